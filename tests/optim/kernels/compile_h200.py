"""python compile_h200.py: compile the step's kernels for an H200, without one; prints what the test looks at, as JSON.

A process of its own, because the interpreter that the other tests use is chosen when Triton is imported. Only what asks
for a device is stood in for: Triton's driver and torch's compute capability. The launches are those of
`step_triton._launches` for the tunings of `TUNINGS`.
"""

import json
import re
from types import SimpleNamespace

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from halfbyte.optim.formats import FORMATS
from halfbyte.optim.kernels import step_triton
from halfbyte.optim.kernels.table_triton import Kind, Part


class H200:
    """As much of a Triton driver as compiling takes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(name: str, dtype: tl.dtype) -> dict[str, str]:
    """Triton's intermediate texts of `step_blocks` for whole tiles at aligned addresses."""
    part = Part(Kind(quantized=True, aligned=True, tails=False), torch.zeros(64, dtype=torch.int32), 4)
    long = torch.zeros(16, dtype=torch.int64)
    plan = SimpleNamespace(device=torch.device("cuda"), flat=True, grads=long, parts=[part])
    off = dict.fromkeys(step_triton.Settings._fields, False)
    settings = step_triton.Settings(**off | {"P": dtype, "G": dtype, "DECOUPLED": True})
    launch = step_triton._launches(plan, FORMATS[name], settings, step_triton.TUNINGS[name])[1]
    scalars, halves = torch.zeros(16), torch.zeros(7, dtype=torch.int32)
    args = long, long, scalars, part.chunk_tensor, part.chunk_tiles, scalars, halves
    return launch.kernel.warmup(*args, grid=launch.grid, **launch.constants, **launch.options).asm


def spreads(ttgir: str) -> dict[str, list[list[int]]]:
    """By a layout's name: the lanes along each dimension, and the warps."""
    numbers = r"(\[[^}]*?\])"
    found = {
        name: [json.loads(lanes), json.loads(warps)]
        for name, lanes, warps in re.findall(
            rf"^(#\w+) = #ttg.blocked<.*threadsPerWarp = {numbers}, warpsPerCTA = {numbers}, order", ttgir, re.MULTILINE
        )
    }
    for name, *bases in re.findall(
        rf"^(#\w+) = #ttg.linear<.*lane = {numbers}, warp = {numbers}, block", ttgir, re.MULTILINE
    ):  # a base moves by a power of two along a dimension
        found[name] = [[2 ** sum(b[dim] > 0 for b in json.loads(some)) for dim in (0, 1)] for some in bases]
    return found


def spread_of_reductions(ttgir: str) -> dict[int, list[tuple[int, int]]]:
    """(lanes, warps) among which each reduction of a tile finds its result, by the axis that it takes away."""
    found: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    reduction = (
        r'"tt.reduce"\(%\w+\) <\{axis = (\d) : i32\}>(?:(?!"tt.reduce").)*?\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\)'
    )
    for axis, name in re.findall(reduction, ttgir, re.DOTALL):
        lanes, warps = spreads(ttgir)[name]
        found[int(axis)].append((lanes[int(axis)], warps[int(axis)]))
    return found


def main() -> None:
    driver.set_active(H200())
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    found = {}
    for name in FORMATS:
        for dtype in (tl.bfloat16, tl.float32):
            asm = compiled(name, dtype)
            found[f"{name} {dtype}"] = {
                "spread": spread_of_reductions(asm["ttgir"]),
                "casts": asm["ptx"].count("cvt.rn.satfinite.e4m3x2.f32"),
                "casts back": asm["ptx"].count("cvt.rn.f16x2.e4m3x2"),
                "shuffles": asm["ptx"].count("shfl.sync"),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
