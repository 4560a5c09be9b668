"""FSDP2 and DeepSpeed ZeRO against DDP on real GPUs: is it right, what does a rank hold, how fast is a step.

    torchrun --nproc-per-node 2 -m benchmarks.fsdp2              # NCCL, shapes of Llama 3.1 8B
    torchrun --nproc-per-node 2 -m benchmarks.fsdp2 --tiny       # gloo on a CPU: a trial of the script itself

The package asks for torch 2.13. On an earlier one this script, and only it, bridges what FSDP2 lacks: it makes
`nn.Parameter` of uint8 shards without a gradient. No mixed-precision policy is used, since that one cannot be
bridged.
"""

import argparse
import gc
import os
import time
from types import SimpleNamespace
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

from benchmarks.ddp import PROJECTIONS, SHAPES, TOKENS, header, make_base, say, step_s, worst_over_ranks
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel import ddp, prepare_for_deepspeed
from halfbyte.parallel.fsdp2 import check_torch, shard_model
from halfbyte.parallel.gather import gather_trainable
from halfbyte.parallel.mesh import data_mesh
from tests.parallel import zero
from tests.parallel.training import STEPS, Case, error, forward_backward, make, one_process

MODES = ("plain", "dynamic", "merge-aware", "merge-aware dynamic")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, gloo, CPU")
    tiny = parser.parse_args().tiny
    device = torch.device("cpu" if tiny else f"cuda:{os.environ['LOCAL_RANK']}")
    if tiny:
        os.environ |= zero.environment()  # DeepSpeed asks for the accelerator when it is imported
    else:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "nccl")
    bridge()
    say(header(device).replace("Data parallel", "FSDP2 and ZeRO"))
    correctness(device)
    steps("tiny" if tiny else "8B", device)
    dist.destroy_process_group()


def bridge() -> None:
    """On torch before 2.13: parameters that FSDP2 makes of non-floating tensors require no gradient."""
    try:
        check_torch()
    except RuntimeError as error:
        say(f"Bridged in this script: {error}\n")

        def parameter(tensor: Tensor, requires_grad: bool | None = None) -> nn.Parameter:
            return nn.Parameter(tensor, tensor.is_floating_point() if requires_grad is None else requires_grad)

        _fsdp_param.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})  # type: ignore[attr-defined]


def correctness(device: torch.device) -> None:
    """Five AdamW steps against one process that accumulates, tiny Llama, fp32; others start on the meta device."""
    say("## Correctness, fp32\n\n| mode | error of the adapter after 5 steps | base unchanged |\n|---|---|---|")
    for mode in MODES:
        case = Case(mode=mode, device=str(device), on_meta=True)
        model = make(case, dist.get_rank())
        before = {n: p.detach().clone() for n, p in make(case).named_parameters() if p.dtype == torch.uint8}
        shard_model(model, data_mesh(device.type))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(STEPS):
            forward_backward(case, model, step, dist.get_rank(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: p.full_tensor() for n, p in model.named_parameters() if p.dtype == torch.uint8}
        same = all(torch.equal(whole[n], t.to(device)) for n, t in before.items())
        expected = {n: t.cpu() for n, t in one_process(case, dist.get_world_size()).adapter.items()}
        worst = worst_over_ranks(error(gather_trainable(model), expected))
        say(f"| {mode} | {worst:.1e} | {'yes' if worst_over_ranks(float(not same)) == 0 else 'NO'} |")


def steps(size: str, device: torch.device) -> None:
    """A step of one micro-batch a GPU under each engine; memory at rest and at its peak."""
    say(
        f"\n## Step: {TOKENS[size]} tokens a GPU, LoRA r 16 on all projections, checkpointing, AdamW, bf16\n\n"
        "| engine | seconds a step (median of 8) | tokens/s | at rest, each GPU (GB) | bytes a packed parameter "
        "| peak (GB) |\n|---|---|---|---|---|---|"
    )
    for engine in ("DDP", "FSDP2", "FSDP2, no reshard", "ZeRO-2", "ZeRO-3"):
        model = deepspeed_engine(engine, size, device) if "ZeRO" in engine else wrapped(engine, size, device)
        rest = torch.cuda.memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, SHAPES[size]["vocab_size"], (1, TOKENS[size]), device=device)
        step = zero_step_s if "ZeRO" in engine else step_s
        seconds = worst_over_ranks(step(model, tokens, device))
        peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        rate = dist.get_world_size() * TOKENS[size] / seconds
        at_rest, at_peak = worst_over_ranks(rest), worst_over_ranks(peak)
        bytes_each = 1e9 * at_rest / sum(m.in_features * m.out_features for m in nvfp4_modules(model).values())
        say(f"| {engine} | {seconds:.3f} | {rate:,.0f} | {at_rest:.2f} | {bytes_each:.3f} | {at_peak:.2f} |")
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def deepspeed_engine(name: str, size: str, device: torch.device) -> Any:
    """Stage 2 or 3 with bf16 parameters and fp32 masters, as DeepSpeed has it."""
    import deepspeed

    model = lora_on_rank_zero(size, torch.device("cpu") if name == "ZeRO-3" else device)
    config = prepare_for_deepspeed(
        model,
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": int(name[-1])},
        },
    )
    deepspeed.init_distributed(dist.get_backend())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def zero_step_s(engine: Any, tokens: Tensor, device: torch.device) -> float:
    """`step_s`, as DeepSpeed steps."""
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[3:])[len(seconds[3:]) // 2]


def lora_on_rank_zero(size: str, device: torch.device) -> Any:
    """Base and adapter with weights on rank zero alone."""
    rank = dist.get_rank()
    base = make_base(size, device if rank == 0 else torch.device("meta"))
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
    model: Any = peft.get_peft_model(base, config, low_cpu_mem_usage=rank > 0)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def wrapped(engine: str, size: str, device: torch.device) -> nn.Module:
    model = lora_on_rank_zero(size, device)
    if engine == "DDP":
        return ddp(model, device=device)
    return shard_model(model, data_mesh(device.type), reshard_after_forward=engine == "FSDP2")


if __name__ == "__main__":
    main()
