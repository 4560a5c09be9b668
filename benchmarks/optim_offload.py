"""Time and memory of states in CPU memory, beside torchao's CPUOffloadOptimizer, and of gradient release.

    python benchmarks/optim_offload.py --out benchmarks/results/optim_offload.md        # one GPU, about two minutes

The model is 4 layers of Llama-3.1-8B's linear shapes (0.87e9 bf16 parameters). Time: a step after backward, median of
five, with a synchronization around it, since torchao copies gradients during backward and steps on the CPU afterwards.
Memory: what the GPU holds after a step, and the peak of backward and step, both beyond the parameters.
"""

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.optim import AdamW4bit, AdamW8bit
from halfbyte.optim.gradient_release import GradientRelease

LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


class Layers(nn.Module):
    """Weights that a backward pass reaches one after the other; the arithmetic itself is next to nothing."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        shapes = [shape for _ in range(num_layers) for shape in LLAMA]
        self.weights = nn.ParameterList(torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in shapes)

    def forward(self) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for weight in self.weights:
            total = total + (weight * total.bfloat16().cos()).float().square().mean()
        return total


def torchao_offload(params: Any, **options: Any) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(params, torch.optim.AdamW, **options)


CASES: dict[str, tuple[Callable, bool]] = {
    "torch AdamW (fused, bf16 states on the GPU)": (lambda p: torch.optim.AdamW(p, fused=True), False),
    "halfbyte 8-bit, states on the GPU": (AdamW8bit, False),
    "halfbyte 8-bit, gradient release": (AdamW8bit, True),
    "halfbyte 8-bit, offload_states": (lambda p: AdamW8bit(p, offload_states=True), False),
    "halfbyte 4-bit, offload_states": (lambda p: AdamW4bit(p, offload_states=True), False),
    "torchao CPUOffloadOptimizer": (torchao_offload, False),
    "torchao CPUOffloadOptimizer, offload_gradients": (lambda p: torchao_offload(p, offload_gradients=True), False),
}


def measure(make: Callable, release: bool, num_layers: int) -> tuple[float, float, float, float]:
    """(backward and step ms, step ms, GB held, GB at the peak), the last two beyond the parameters."""
    model = Layers(num_layers)
    optimizer = make(list(model.parameters()))
    if release:
        GradientRelease(model, optimizer)
    base = torch.cuda.memory_allocated()
    both, steps = [], []
    for i in range(7):
        if i == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        model().backward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        end = time.perf_counter()
        optimizer.zero_grad()
        if i >= 2:
            both.append(1e3 * (end - start))
            steps.append(1e3 * (end - middle))
    held = (torch.cuda.memory_allocated() - base) / 1e9
    peak = (torch.cuda.max_memory_allocated() - base) / 1e9
    return statistics.median(both), statistics.median(steps), held, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_params = args.layers * sum(a * b for a, b in LLAMA)
    lines = [
        f"# Offload and gradient release ({time.strftime('%Y-%m-%d')})",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} CPU threads; {num_params / 1e9:.2f}e9 bf16 parameters.",
        "",
        "| optimizer | backward + step, ms | step, ms | GB held | GB at the peak |",
        "|---|---|---|---|---|",
    ]
    for name, (make, release) in CASES.items():
        try:
            figures = measure(make, release, args.layers)
            lines.append(f"| {name} | {figures[0]:.1f} | {figures[1]:.1f} | {figures[2]:.2f} | {figures[3]:.2f} |")
        except (ImportError, RuntimeError, AssertionError) as error:
            lines.append(f"| {name} | not run: {str(error).splitlines()[0]} | | | |")
        gc.collect()
        torch.cuda.empty_cache()
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
