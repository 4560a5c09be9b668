"""Time other sizes of the NVFP4 kernels' programs on a 14336x4096 layer: what to put at the top of each kernel's file.

PYTHONPATH=. python benchmarks/linear_tune.py
"""

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.linear import RANK, SCALING, Call, nvfp4, over, random, table, time_ms
from halfbyte.nvfp4.kernels import (
    dequantize_triton,
    few_rows_triton,
    matvec_triton,
    quantize_triton,
    small_matmul_triton,
    snap_triton,
)

N, K = 14336, 4096
Sizes = dict[str, int]


def trial(name: str, module: ModuleType, sizes: Sizes, calls: list[Call]) -> tuple[object, ...]:
    """A row: the kernel, its sizes, microseconds (or why it does not run)."""
    before = {key: getattr(module, key) for key in sizes}
    vars(module).update(sizes)
    try:
        result: object = time_ms(calls) * 1e3
    except Exception as problem:  # a size that the machine does not hold
        result = repr(problem)[:60]
    vars(module).update(before)
    return name, ", ".join(f"{key} {value}" for key, value in sizes.items()), result


def elementwise(raw: list[tuple[Tensor, ...]]) -> list[tuple[object, ...]]:
    """Dequantize, quantize, snap."""
    scale = torch.tensor(1e-3, device="cuda")
    weights = [random(N, K) for _ in range(3)]
    factors = (torch.randn(RANK, K, device="cuda") * 0.02, torch.randn(N, RANK, device="cuda") * 0.02)
    decode = [partial(dequantize_triton.dequantize, *parts, torch.bfloat16) for parts in raw]
    snap = [partial(snap_triton.snap_low_rank, *parts, *factors, SCALING, (1 << 60, 1 << 61)) for parts in raw]
    rows = []
    for warps in (2, 4, 8):
        rows.append(trial("dequantize", dequantize_triton, {"NUM_WARPS": warps, "BLOCK_WORDS": 32 * warps}, decode))
    for warps, blocks in ((4, 128), (2, 64), (1, 32), (8, 256), (4, 256)):
        sizes = {"NUM_WARPS": warps, "NUM_BLOCKS": blocks}
        rows.append(trial("quantize", quantize_triton, sizes, over(weights, quantize_triton.quantize, scale)))
    for warps, num_rows, words in ((4, 64, 32), (4, 32, 64), (2, 32, 32), (2, 16, 64), (1, 16, 32), (1, 32, 16)):
        rows.append(trial("snap", snap_triton, {"NUM_WARPS": warps, "WORDS": words, "ROWS": num_rows}, snap))
    return rows


def few_rows(raw: list[tuple[Tensor, ...]]) -> list[tuple[object, ...]]:
    """The three products."""
    rows = []
    x = random(1, K)
    calls: list[Call] = [partial(matvec_triton.matvec, x, *parts, None) for parts in raw]
    for warps, num_rows in ((4, 4), (4, 8), (4, 16), (8, 8), (2, 8)):
        sizes = {"NUM_WARPS": warps, "BLOCKS": 32 * warps, "ROWS": num_rows}
        rows.append(trial("matvec", matvec_triton, sizes, calls))
    for m in (2, 8):
        calls = [partial(few_rows_triton.few_rows, random(m, K), *parts, None) for parts in raw]
        for block_n, blocks, warps, stages, programs in FEW:
            sizes = {"BLOCK_N": block_n, "BLOCKS": blocks, "NUM_WARPS": warps, "NUM_STAGES": stages}
            sizes["PROGRAMS_PER_MULTIPROCESSOR"] = programs
            rows.append(trial(f"few rows, {m}", few_rows_triton, sizes, calls))
    for m in (16, 64):
        x = random(m, K)
        calls = [partial(small_matmul_triton.small_matmul, x, *parts, None) for parts in raw]
        for block_n, blocks, stages, programs in SMALL:
            sizes = {"BLOCK_N": block_n, "BLOCKS": blocks, "NUM_STAGES": stages}
            sizes["PROGRAMS_PER_MULTIPROCESSOR"] = programs
            rows.append(trial(f"small matmul, {m} rows", small_matmul_triton, sizes, calls))
    return rows


FEW = ((64, 8, 4, 3, 2), (64, 8, 4, 3, 4), (64, 8, 8, 3, 2), (32, 8, 4, 3, 1), (32, 8, 8, 4, 1))
SMALL = ((64, 16, 3, 4), (64, 16, 3, 8), (64, 16, 2, 8), (64, 32, 2, 8), (128, 16, 3, 4), (64, 16, 4, 16))


def main() -> None:
    torch.manual_seed(0)
    parts = [nvfp4(N, K).parts() for _ in range(6)]
    raw = [(each.qdata, each.scale.view(torch.uint8), each.global_scale) for each in parts]
    table(f"Sizes, {N}x{K}", " kernel | sizes | us ", elementwise(raw) + few_rows(raw))


if __name__ == "__main__":
    main()
