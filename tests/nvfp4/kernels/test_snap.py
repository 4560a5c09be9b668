"""The fused kernel against nvfp4/snap.py and lora/merge.py's product, bit for bit.

The product is in fp64 in both: its error is 2^-53 of the terms, so another order of the terms reaches a bit of the fp32
delta about once in 10^8 elements, and a code only if a step lies between the two; these sizes have 10^4 elements.
"""

import math

import pytest
import torch
from torch import Tensor

from halfbyte.lora import merged_parts
from halfbyte.numerics.dither import block_keys, row_keys
from halfbyte.numerics.hashing import key64
from halfbyte.nvfp4 import NVFP4Parts, dequantize, quantize
from tests.nvfp4.kernels.parts import random_parts

SHAPES = [(1, 16, 1), (3, 48, 5), (17, 272, 16), (9, 1040, 8)]
NAME = "model.layers.0.mlp.up_proj"


def kernel(parts: NVFP4Parts, down: Tensor, up: Tensor, scaling: float, seed: int | None) -> Tensor:
    """Codes in memory that held garbage before; seed None rounds to nearest."""
    from halfbyte.nvfp4.kernels.snap_triton import snap_low_rank_into

    keys = None if seed is None else (key64("row", seed, NAME), key64("block", seed, NAME))
    out = torch.full_like(parts.qdata, 0xA5)
    return snap_low_rank_into(
        out, parts.qdata, parts.scale.view(torch.uint8), parts.global_scale, down, up, scaling, keys
    )


def on_cpu(parts: NVFP4Parts) -> NVFP4Parts:
    return NVFP4Parts(*(component.cpu() for component in parts))


def factors(n: int, k: int, r: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    down, up = torch.randn(r, k, generator=generator), torch.randn(n, r, generator=generator)
    return down.to(device, dtype), up.to(device, dtype)


@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_definition(shape: tuple[int, int, int], rounding: str, device: str) -> None:
    n, k, r = shape
    parts = random_parts(n, k, device=device)
    down, up = factors(n, k, r, device)
    scaling = float(dequantize(parts).std()) / math.sqrt(3 * r)  # no short binary fraction
    found = kernel(parts, down, up, scaling, 7 if rounding == "dither" else None)
    want = merged_parts(on_cpu(parts), down.cpu(), up.cpu(), scaling, name=NAME, seed=7, rounding=rounding)
    assert torch.equal(found.cpu(), want.qdata)
    assert not torch.equal(want.qdata, parts.qdata.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_factors(dtype: torch.dtype, device: str) -> None:
    parts = quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(5)).to(device))
    down, up = factors(24, 64, 4, device, dtype)
    want = merged_parts(on_cpu(parts), down.cpu(), up.cpu(), 0.1, name=NAME)
    assert torch.equal(kernel(parts, down, up, 0.1, 0).cpu(), want.qdata)


def test_a_zero_change_keeps_every_byte(device: str) -> None:
    """Codes of -0, scales of zero, subnormal and NaN scales included."""
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 1).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    qdata = (codes[::2] | (codes[1::2] << 4)).expand(256, 8).contiguous()
    parts = NVFP4Parts(qdata, scale, torch.tensor(1e-3, device=device))
    down, up = factors(256, 16, 2, device)
    for seed in (0, None):
        assert torch.equal(kernel(parts, down, torch.zeros_like(up), 2.0, seed), qdata)


def test_changes_of_every_size(device: str) -> None:
    """From far below a step to far beyond 6 codes, where values saturate; factors up to the ends of fp32."""
    parts = random_parts(64, 32, device=device)
    down, up = factors(64, 32, 1, device)
    up = up * torch.logspace(-38, 37, 64, base=10.0, device=device).unsqueeze(-1)
    for seed in (3, None):
        rounding = "nearest" if seed is None else "dither"
        want = merged_parts(on_cpu(parts), down.cpu(), up.cpu(), 1.0, name=NAME, seed=seed or 0, rounding=rounding)
        assert torch.equal(kernel(parts, down, up, 1.0, seed).cpu(), want.qdata)


@pytest.mark.parametrize(("num_rows", "num_blocks"), [(1000, 3), (5, 650)])
def test_keys(num_rows: int, num_blocks: int, device: str) -> None:
    from halfbyte.nvfp4.kernels.dither_triton import keys

    pair = (key64("row", 11, NAME), key64("block", 11, NAME))
    rows, blocks = keys(*pair, num_rows, num_blocks, torch.device(device))
    assert torch.equal(rows.cpu(), row_keys(11, NAME, 0, num_rows))
    assert torch.equal(blocks.cpu(), block_keys(11, NAME, 0, num_blocks))
