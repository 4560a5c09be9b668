"""Tensor parallelism on real GPUs: is it right, how fast is a step at degree 1 and at all ranks, what does a rank hold.

torchrun --nproc-per-node 2 -m benchmarks.tp              # NCCL, shapes of Llama 3.1 8B
torchrun --nproc-per-node 2 -m benchmarks.tp --tiny       # gloo on a CPU: a trial of the script itself
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ddp import PROJECTIONS, SHAPES, TOKENS, header, make_base, say, step_s, worst_over_ranks
from halfbyte.lora import fuse, make_merge_aware
from halfbyte.parallel.gather import gather_trainable
from halfbyte.parallel.tensor_parallel import tensor_parallel
from tests.parallel.models import batch, loss_of, tiny_lora, trainable
from tests.parallel.training import STEPS, error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, gloo, CPU")
    tiny = parser.parse_args().tiny
    device = torch.device("cpu" if tiny else f"cuda:{os.environ['LOCAL_RANK']}")
    if not tiny:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if tiny else "nccl")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    say(header(device).replace("Data parallel", "Tensor parallel"))
    correctness(mesh, device)
    steps(mesh, "tiny" if tiny else "8B", device)
    dist.destroy_process_group()


def correctness(mesh: Any, device: torch.device) -> None:
    """Five AdamW steps against one process on the same batches, tiny Llama."""
    say("## Correctness\n\n| run | error of losses | error of the adapter after 5 steps |\n|---|---|---|")
    for name, dtype, packed, kind in (
        ("fp32", torch.float32, True, unchanged),
        ("fp32, fused", torch.float32, True, fuse),
        ("fp32, merge-aware", torch.float32, True, make_merge_aware),
        ("bf16", torch.bfloat16, True, unchanged),
        ("bf16, fused", torch.bfloat16, True, fuse),
        ("bf16, dense base", torch.bfloat16, False, unchanged),
    ):
        options: dict[str, Any] = {"dtype": dtype, "packed": packed, "device": str(device)}
        model, reference = tensor_parallel(kind(tiny_lora(**options)), mesh), kind(tiny_lora(**options))
        losses, expected = train(model), train(reference)
        worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        whole = {n: t.cpu() for n, t in trainable(reference).items()}
        adapter = worst_over_ranks(error(gather_trainable(model), whole))
        say(f"| {name} | {worst_over_ranks(worst):.1e} | {adapter:.1e} |")


def unchanged(model: nn.Module) -> nn.Module:
    return model


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps(mesh: Any, size: str, device: torch.device) -> None:
    """A step on the same batch with degree 1 (rank zero alone) and with all ranks; PEFT's layers, and fused ones."""
    tokens = torch.arange(TOKENS[size], device=device)[None] * 7919 % SHAPES[size]["vocab_size"]
    say(
        f"\n## Step: one batch of {TOKENS[size]} tokens, LoRA r 16 on all projections, checkpointing, AdamW, bf16\n\n"
        "| degree | layers | seconds a step (median of 8) | tokens/s | at rest, each GPU (GB) | peak (GB) |\n"
        "|---|---|---|---|---|---|"
    )
    for name, kind in (("PEFT's", unchanged), ("fused", fuse)):
        for degree in (1, mesh.size()):
            row = [0.0, 0.0, 0.0]
            if degree > 1 or dist.get_rank() == 0:
                row = measured(prepared(mesh if degree > 1 else None, size, device, kind), tokens, device)
            dist.barrier()
            seconds, rest, peak = (worst_over_ranks(value) for value in row)
            say(f"| {degree} | {name} | {seconds:.3f} | {TOKENS[size] / seconds:,.0f} | {rest:.2f} | {peak:.2f} |")


def prepared(mesh: Any, size: str, device: torch.device, kind: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """rank zero's base for degree 1; cut for more, with the other ranks on the meta device until then."""
    rank = dist.get_rank() if mesh is not None else 0
    base = make_base(size, device if rank == 0 else torch.device("meta"))
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
    model: Any = kind(peft.get_peft_model(base, config, low_cpu_mem_usage=rank > 0))
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model if mesh is None else tensor_parallel(model, mesh)


def measured(model: nn.Module, tokens: torch.Tensor, device: torch.device) -> list[float]:
    """Seconds a step, GB at rest, GB at the peak of the steps."""
    if device.type != "cuda":
        return [step_s(model, tokens, device), 0.0, 0.0]
    torch.cuda.empty_cache()
    rest = torch.cuda.memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return [step_s(model, tokens, device), rest, torch.cuda.max_memory_allocated() / 1e9]


if __name__ == "__main__":
    main()
