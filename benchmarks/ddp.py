"""Data parallel on real GPUs: is it right, what does the check cost, how does a step scale.

    torchrun --nproc-per-node 2 -m benchmarks.ddp                # NCCL, shapes of Llama 3.1 8B
    torchrun --nproc-per-node 2 -m benchmarks.ddp --tiny         # gloo on a CPU: a trial of the script itself

Prints Markdown on rank zero. The base has real shapes and random codes: speed does not depend on their values.
"""

import argparse
import datetime
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM

from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules, replace_module
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel import SyncReport, ddp, synchronize
from halfbyte.parallel.broadcast import broadcast_tensors
from halfbyte.parallel.digests import content_digests
from tests.parallel.models import PROJECTIONS, tiny_lora
from tests.parallel.training import Case, error, one_process, this_rank, worst_gradient

SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320},
}
HEADS = {"8B": (32, 8), "tiny": (4, 2)}
TOKENS = {"8B": 2048, "tiny": 64}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, gloo, CPU")
    tiny = parser.parse_args().tiny
    device = torch.device("cpu" if tiny else f"cuda:{os.environ['LOCAL_RANK']}")
    if not tiny:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "nccl")
    size = "tiny" if tiny else "8B"
    say(header(device))
    correctness(str(device))
    model = start_up(size, device)
    steps(model, size, device)
    dist.destroy_process_group()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def header(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return (
        f"# Data parallel, {dist.get_world_size()} ranks, {dist.get_backend()}\n\n"
        f"{datetime.date.today()}, {name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"peft {peft.__version__}, commit {commit or 'unknown'}\n"
    )


def correctness(device: str) -> None:
    """Points 1 and 2 of the data-parallel contract, on a tiny Llama in fp32 and bf16."""
    size = dist.get_world_size()
    say("## Correctness\n\n| check | result |\n|---|---|")
    cases = {
        "fp32, 5 AdamW steps": Case(device=device),
        "fp32, accumulation with no_sync": Case(device=device, accumulate=2),
        "fp32, ranks on meta, adapters seeded differently": Case(device=device, on_meta=True, differently_seeded=True),
        "fp32, plain DistributedDataParallel": Case(device=device, plain=True),
        "fp32, checkpointing": Case(device=device, checkpointing=False),
        "bf16": Case(device=device, dtype=torch.bfloat16),
        "bf16, dense base": Case(device=device, dtype=torch.bfloat16, packed=False),
    }
    for name, case in cases.items():
        found, expected = this_rank(case), one_process(case, size)
        gradients = worst_over_ranks(worst_gradient(found, expected))
        adapter = worst_over_ranks(error(found.adapter, expected.adapter))
        say(f"| {name}: gradients, adapter, relative to one process | {gradients:.1e}, {adapter:.1e} |")
    say(f"| every byte pattern of block scales after the broadcast | {bytes_exact(device)} |")
    for name, text in refusals(device).items():
        say(f"| rank 1 has another {name}: same error on all ranks | {text} |")


def worst_over_ranks(value: float) -> float:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def bytes_exact(device: str) -> str:
    scales = torch.arange(256, dtype=torch.uint8, device=device).repeat(16)
    expected = scales.clone()
    if dist.get_rank():
        scales ^= 0x55
    broadcast_tensors([scales.view(torch.float8_e4m3fn)])
    return "equal" if worst_over_ranks(float(not torch.equal(scales, expected))) == 0 else "DIFFERENT"


def refusals(device: str) -> dict[str, str]:
    found = {}
    for name in ("dtype", "activation"):
        model = tiny_lora(device=device)
        layer = next(iter(nvfp4_modules(model).values()))
        if dist.get_rank() == 1:
            setattr(layer, name, torch.bfloat16 if name == "dtype" else ActivationQuant())
        start, text = time.perf_counter(), "NO ERROR"
        try:
            ddp(model)
        except ValueError as caught:
            text = str(caught)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, text)
        same = "yes" if len(set(texts)) == 1 and text != "NO ERROR" else f"NO: {texts}"
        found[name] = f"{same}, after {time.perf_counter() - start:.2f} s"
    return found


def make_base(size: str, device: torch.device) -> nn.Module:
    """A bf16 Llama whose projections are packed, with random codes and sane scales; empty on the meta device."""
    heads, kv_heads = HEADS[size]
    config = LlamaConfig(
        **SHAPES[size], num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False, dtype="bfloat16"
    )
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for fqn, module in list(model.named_modules()):
        if fqn.split(".")[-1] in PROJECTIONS:
            assert isinstance(module, nn.Linear)
            replace_module(model, fqn, random_layer(module.in_features, module.out_features, device))
    model.requires_grad_(False)
    if device.type != "meta":
        fill_dense(model, device)
    return model.to(device)


def random_layer(in_features: int, out_features: int, device: torch.device) -> NVFP4Linear:
    layer = NVFP4Linear(in_features, out_features, device=device, dtype=torch.bfloat16)
    if device.type != "meta":
        layer.qdata.random_(0, 256)
        layer.scale.random_(0x30, 0x40)  # E4M3 from 0.5 to 2
        layer.global_scale.copy_(torch.tensor([0.2 / in_features**0.5]).view(torch.uint8))
    return layer


def fill_dense(model: nn.Module, device: torch.device) -> None:
    """Ones for norms, small random values for embeddings and head."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                dense = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
                if "Norm" not in type(module).__name__:
                    dense.normal_(std=0.02)
                module.register_parameter(name, nn.Parameter(dense, requires_grad=False))


def start_up(size: str, device: torch.device) -> nn.Module:
    """Time of verify and synchronize when only rank zero has the base, and of one plain broadcast of the same bytes."""
    rank = dist.get_rank()
    base = make_base(size, device if rank == 0 else torch.device("meta"))
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
    model = peft.get_peft_model(base, config, low_cpu_mem_usage=rank > 0)
    host_before = host_peak_bytes()
    report = synchronize(model, device=device)
    assert isinstance(report, SyncReport)
    host = host_peak_bytes() - host_before
    again = synchronize(model, device=device)
    assert isinstance(again, SyncReport)
    plain = plain_broadcast_s(report.size_bytes, device)
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    num_base = sum(layer.in_features * layer.out_features for layer in nvfp4_modules(model).values())
    gb = report.size_bytes / 1e9
    say(
        f"\n## Start-up: {num_base / 1e9:.2f}e9 packed parameters, {gb:.2f} GB in {report.num_tensors} tensors\n\n"
        "| | first time, other ranks on meta | again |\n|---|---|---|\n"
        f"| compare descriptions, allocate (s) | {report.compare_s:.2f} | {again.compare_s:.2f} |\n"
        f"| broadcast (s) | {report.broadcast_s:.3f} | {again.broadcast_s:.3f} |\n"
        f"| broadcast (GB/s) | {gb / report.broadcast_s:.1f} | {gb / again.broadcast_s:.1f} |\n"
        f"| one plain broadcast of the same bytes (GB/s) | | {gb / plain:.1f} |\n"
        f"| digest, exchange (s) | {report.digest_s:.2f} | {again.digest_s:.2f} |\n"
        f"| host memory added on each rank (GB) | {', '.join(f'{h / 1e9:.2f}' for h in hosts)} | |"
    )
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, content_digests(model))
    say(f"\nAll ranks hold the same bytes: {'yes' if all(d == digests[0] for d in digests) else 'NO'}.")
    return model


def plain_broadcast_s(size_bytes: int, device: torch.device) -> float:
    """Seconds of the fastest of three broadcasts of one flat tensor."""
    flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        wait(device)
        start = time.perf_counter()
        dist.broadcast(flat, 0)
        wait(device, barrier=False)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def wait(device: torch.device, *, barrier: bool = True) -> None:
    if barrier:
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def host_peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def steps(model: Any, size: str, device: torch.device) -> None:
    """Median step of one micro-batch a GPU: on one GPU alone, then on all under DDP."""
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    count = TOKENS[size]
    tokens = torch.randint(0, SHAPES[size]["vocab_size"], (1, count), device=device)
    alone = step_s(model, tokens, device) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    together = worst_over_ranks(step_s(ddp(model), tokens, device))
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        say(
            f"\n## Step: {count} tokens a GPU, LoRA r 16 on all projections, checkpointing, AdamW, bf16\n\n"
            "| | seconds a step (median of 8) | tokens/s | GPU memory (GB) |\n|---|---|---|---|\n"
            f"| one GPU | {alone:.3f} | {count / alone:,.0f} | |\n"
            f"| {ranks} GPUs, DDP | {together:.3f} | {ranks * count / together:,.0f} | {peak:.1f} |\n\n"
            f"Scaling: {alone / together:.3f} of {ranks} times one GPU."
        )


def step_s(model: nn.Module, tokens: Tensor, device: torch.device) -> float:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[3:])[len(seconds[3:]) // 2]


if __name__ == "__main__":
    main()
