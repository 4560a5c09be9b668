"""What gradient release and offloaded states save, and what they cost: peak memory and time of a whole training step.

    python benchmarks/optim_memory.py --out benchmarks/results/optim-memory.md     # one GPU, about a minute
    python benchmarks/optim_memory.py --device cpu --layers 2 --dim 64             # a smoke run: times and losses only

Model: a stack of gated MLPs with the shapes of Llama-3.1-8B's (8 layers, 1.41e9 bf16 parameters in 24 tensors) on few
tokens, so that parameters, gradients and states make the memory. Each way of training runs alone, from the same
weights on the same inputs, ten steps; ours must agree with one another to the last bit, since neither option changes
arithmetic. torchao's CPUOffloadOptimizer keeps fp32 or bf16 states and steps on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], None]  # one optimizer step, after backward


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def torch_fused(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return lambda: (optimizer.step(), optimizer.zero_grad())[1]


def ours(release: bool = False, **options: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from halfbyte.optim import AdamW8bit
        from halfbyte.optim.gradient_release import GradientRelease

        optimizer = AdamW8bit(model.parameters(), lr=1e-4, **options)
        if release:
            GradientRelease(model, optimizer)
        return lambda: (optimizer.step(), optimizer.zero_grad())[1]

    return build


def torchao_offload(offload_gradients: bool) -> Callable[[nn.Module], Step]:
    def build(model: nn.Module) -> Step:
        from torchao.optim import CPUOffloadOptimizer

        optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, lr=1e-4, fused=True
        )
        return lambda: (optimizer.step(), optimizer.zero_grad())[1]

    return build


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "torch AdamW(fused=True)": torch_fused,
    "AdamW8bit": ours(),
    "AdamW8bit, gradient release": ours(release=True),
    "AdamW8bit, offload_states": ours(offload_states=True),
    "AdamW8bit, both": ours(release=True, offload_states=True),
    "torchao CPUOffloadOptimizer": torchao_offload(False),
    "torchao CPUOffloadOptimizer, offload_gradients": torchao_offload(True),
}


@dataclass(frozen=True)
class Result:
    """peak and resting in bytes of device memory, seconds a whole step, loss after the last step."""

    peak: int
    resting: int
    seconds: list[float]
    loss: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(build: Callable[[nn.Module], Step], args: argparse.Namespace, device: torch.device) -> Result:
    torch.manual_seed(0)
    with torch.device(device):
        layers = [GatedMLP(args.dim, args.dim * 7 // 2).bfloat16() for _ in range(args.layers)]
        model = nn.Sequential(*layers)
        x = torch.randn(args.tokens, args.dim, dtype=torch.bfloat16)
    step = build(model)
    seconds, peak, loss = [], 0, torch.zeros(())
    for i in range(args.steps):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        start = time.perf_counter()
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        step()
        synchronize(device)
        if i >= 2:  # states exist, kernels are compiled
            seconds.append(time.perf_counter() - start)
            peak = max(peak, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
    resting = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    return Result(peak, resting, seconds, loss.item())


def git_commit() -> str:
    """Of the checkout; "unknown" where there is none (say so with --commit)."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=4096, help="width; the hidden one is 3.5 times that")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=git_commit(), help="named in the report")
    args = parser.parse_args()

    device = torch.device(args.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    num_params = 3 * args.layers * args.dim * (args.dim * 7 // 2)
    lines = [
        "# Gradient release and offloaded states: memory and time of a training step",
        "",
        f"{machine}; Python {platform.python_version()}, torch {torch.__version__}; commit {args.commit}. "
        f"{num_params / 1e9:.2f}e9 bf16 parameters in {3 * args.layers} tensors, {args.tokens} tokens; peak and time "
        f"of a whole step (forward, backward, optimizer), median of {args.steps - 2}.",
        "",
        "| | peak GB | at rest GB | bytes a parameter at the peak | ms a step | loss after the last |",
        "|---|---|---|---|---|---|",
    ]
    for name in args.only:
        try:
            result = run(WAYS[name], args, device)
        except (ImportError, AssertionError) as error:  # torchao asserts that there is a GPU
            print(f"{name} is left out: {error}")
            continue
        lines.append(
            f"| {name} | {result.peak / 1e9:.2f} | {result.resting / 1e9:.2f} | {result.peak / num_params:.2f} | "
            f"{1e3 * statistics.median(result.seconds):.1f} | {result.loss:.6f} |"
        )
        print(lines[-1], flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(lines))
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
