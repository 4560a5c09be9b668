"""The kernel's values against the reference's, bit for bit.

Both compute code * (global_scale * scale) in fp32, each product rounded once, and round once to the dtype, so there is
no tolerance. Triton's interpreter truncates fp32 to bf16 where the GPU rounds to nearest even; there the expected
value is the truncated reference.
"""

import pytest
import torch
from torch import Tensor

from halfbyte.nvfp4 import NVFP4Parts, dequantize
from tests.nvfp4.kernels.parts import random_parts

SHAPES = [(1, 16), (3, 48), (17, 272), (128, 64), (5, 4112)]


def kernel(parts: NVFP4Parts, dtype: torch.dtype) -> Tensor:
    """The kernel's result in memory that held NaN before."""
    from halfbyte.nvfp4.kernels.dequantize_triton import dequantize_into

    out = torch.full(parts.shape, float("nan"), dtype=dtype, device=parts.qdata.device)
    return dequantize_into(out, parts.qdata, parts.scale.view(torch.uint8), parts.global_scale)


def expected(parts: NVFP4Parts, dtype: torch.dtype) -> Tensor:
    """The reference, computed on the CPU."""
    exact = dequantize(NVFP4Parts(*(component.cpu() for component in parts)), torch.float32)
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        return (exact.view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return exact.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    parts = random_parts(*shape, device=device)
    assert torch.equal(bits(kernel(parts, dtype).cpu()), bits(expected(parts, dtype)))


def test_every_byte_with_every_scale(device: str) -> None:
    """All 256 scale bytes (subnormal, negative, NaN), each with all sixteen codes, both nibble orders."""
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(-1, 1).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    qdata = (codes[::2] | (codes[1::2] << 4)).expand(256, 8).contiguous()
    parts = NVFP4Parts(qdata, scale, torch.tensor(1.2345e-3, device=device))
    found, want = kernel(parts, torch.float32).cpu(), expected(parts, torch.float32)
    finite = ~want.isnan()
    assert torch.equal(finite, ~found.isnan())
    assert torch.equal(bits(found)[finite], bits(want)[finite])


def test_components_that_begin_anywhere(device: str) -> None:
    """A slice of a flat buffer, as FSDP2 hands out, need not be aligned to a word."""
    parts = random_parts(8, 64, device=device)
    buffer = torch.zeros(parts.qdata.numel() + 1, dtype=torch.uint8, device=device)
    buffer[1:] = parts.qdata.flatten()
    moved = parts._replace(qdata=buffer[1:].view_as(parts.qdata))
    assert torch.equal(kernel(moved, torch.float32), kernel(parts, torch.float32))


def test_nothing_to_do(device: str) -> None:
    parts = NVFP4Parts(
        torch.empty(0, 8, dtype=torch.uint8, device=device),
        torch.empty(0, 1, dtype=torch.float8_e4m3fn, device=device),
        torch.tensor(1.0, device=device),
    )
    assert kernel(parts, torch.float32).shape == (0, 16)
