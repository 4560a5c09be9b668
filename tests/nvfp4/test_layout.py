"""The swizzled layout: torchao's, and back."""

import pytest
import torch

from halfbyte.nvfp4.layout import swizzle, swizzled_shape, unswizzle

SHAPES = [(128, 4), (1, 1), (130, 9), (256, 36), (576, 36)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torchao_and_comes_back(shape: tuple[int, int]) -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scale = torch.randint(0, 127, shape, dtype=torch.uint8)
    swizzled = swizzle(scale.view(torch.float8_e4m3fn))
    assert swizzled.dtype == torch.float8_e4m3fn and tuple(swizzled.shape) == swizzled_shape(*shape)
    assert torch.equal(swizzled.view(torch.uint8).flatten(), utils.to_blocked(scale))
    assert torch.equal(unswizzle(swizzled, *shape).view(torch.uint8), scale)
    assert torch.equal(unswizzle(swizzled.flatten(), *shape).view(torch.uint8), scale)


def test_nan_bytes_survive() -> None:
    scale = torch.full((3, 2), 0x7F, dtype=torch.uint8)
    assert torch.equal(unswizzle(swizzle(scale), 3, 2), scale)


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="take 512 bytes, got 8"):
        unswizzle(torch.zeros(8, dtype=torch.uint8), 2, 4)


def test_a_slice_that_begins_anywhere() -> None:
    """Words of four bytes are moved; a buffer's slice need not begin at one."""
    scale = torch.randint(0, 255, (130, 6), dtype=torch.uint8)
    swizzled = swizzle(scale)
    buffer = torch.zeros(swizzled.numel() + 3, dtype=torch.uint8)
    buffer[3:] = swizzled.reshape(-1)
    assert torch.equal(unswizzle(buffer[3:], 130, 6), scale)
