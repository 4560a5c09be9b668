"""Codes and block scales of the kernel against the reference, bit for bit: each operation is the same in IEEE terms."""

import pytest
import torch
from torch import Tensor

from halfbyte.nvfp4 import global_scale_for
from halfbyte.nvfp4.quantize import quantize_rows
from halfbyte.nvfp4.scaling import SMALLEST

SHAPES = [(1, 16), (3, 48), (17, 272), (130, 64)]


def both(x: Tensor, global_scale: Tensor, device: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(kernel, reference): qdata and scale bytes; the kernel's memory held garbage before."""
    from halfbyte.nvfp4.kernels.quantize_triton import quantize_into

    n, k = x.shape
    qdata = torch.full((n, k // 2), 0xA5, dtype=torch.uint8, device=device)
    scale = torch.full((n, k // 16), 0xA5, dtype=torch.uint8, device=device)
    quantize_into(qdata, scale, x.to(device), global_scale.to(device))
    want_qdata, want_scale = quantize_rows(x.float(), global_scale)
    return (qdata.cpu(), scale.cpu()), (want_qdata, want_scale.view(torch.uint8))


def assert_same(x: Tensor, global_scale: Tensor, device: str) -> None:
    found, want = both(x, global_scale, device)
    assert torch.equal(found[1], want[1])
    assert torch.equal(found[0], want[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_to_the_reference(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_same(x, global_scale_for(x.abs().max()), device)


def test_ties_zeros_and_signs(device: str) -> None:
    """All midpoints between codes and their neighbours in fp32, both signs, in blocks whose scale is a power of two
    and in blocks whose reciprocal is inexact; zeros of both signs; a block of zeros."""
    points = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])
    up, down = torch.nextafter(points, torch.tensor(9.0)), torch.nextafter(points, torch.tensor(-9.0))
    rows = torch.cat([sign * torch.cat((p, torch.tensor([6.0]))) for p in (points, up, down) for sign in (1, -1)])
    rows = torch.cat([rows.view(-1, 16) * factor for factor in (1.0, 3.0, 0.7)] + [torch.zeros(1, 16)])
    assert_same(rows, torch.tensor(1.0), device)
    assert_same(rows, torch.tensor(0.37), device)


@pytest.mark.parametrize("global_scale", [SMALLEST, 1e-30, 1e-3, 1.0, 1e30])
def test_block_scales_that_saturate(global_scale: float, device: str) -> None:
    """Blocks far below and above what the global scale can serve: scales clamp to 2^-6 and 448, codes to 6."""
    generator = torch.Generator().manual_seed(2)
    magnitudes = torch.logspace(-9, 9, 40, base=10.0).unsqueeze(-1) * min(global_scale, 1e20)
    assert_same(torch.randn(40, 32, generator=generator) * magnitudes, torch.tensor(global_scale), device)


def test_a_nan_marks_its_block(device: str) -> None:
    """Only the scale is compared: no code of such a block has a meaning."""
    x = torch.randn(2, 48, generator=torch.Generator().manual_seed(3))
    x[0, 20] = float("nan")
    found, want = both(x, torch.tensor(0.01), device)
    assert torch.equal(found[1] & 0x7F, want[1] & 0x7F)
    assert (found[1][0, 1] & 0x7F) == 0x7F
