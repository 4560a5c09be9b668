"""Decoding against torchao bit for bit, and the operator's contract."""

import pytest
import torch

from halfbyte.nvfp4 import NVFP4Linear, NVFP4Parts, dequantize
from halfbyte.nvfp4.dequantize import decode


def random_parts(n: int, k: int) -> NVFP4Parts:
    """All codes, and all finite non-negative block scales, zero and subnormal ones included."""
    generator = torch.Generator().manual_seed(0)
    qdata = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (n, k // 16), generator=generator, dtype=torch.uint8)
    return NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), torch.tensor(1.0012345e-3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (17, 48), (3000, 512), (0, 32)])
def test_bits_equal_torchao(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """(3000, 512) is more than one chunk."""
    torchao_nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    parts = random_parts(*shape)
    found = dequantize(parts, dtype)
    assert found.dtype == dtype and tuple(found.shape) == shape
    if shape[0]:
        theirs = torchao_nvfp4.NVFP4Tensor(parts.qdata, parts.scale, 16, dtype, parts.global_scale).dequantize(dtype)
        assert torch.equal(found.view(torch.uint8), theirs.view(torch.uint8))  # -0 and 0 differ


def test_non_contiguous_and_misaligned_components() -> None:
    """Engines hand out slices of flat buffers: any offset must do, for the four bytes of the global scale too."""
    parts = random_parts(8, 64)
    layer = NVFP4Linear.from_parts(parts, dtype=torch.float32)
    flat = torch.zeros(1 + 4, dtype=torch.uint8)
    flat[1:] = layer.global_scale
    wide = torch.stack((layer.qdata, layer.qdata), dim=-1)
    found = decode(wide[..., 0], layer.scale.T.contiguous().T, flat[1:], torch.float32)
    assert torch.equal(found, dequantize(parts))


def test_operator_contract() -> None:
    layer = NVFP4Linear.from_parts(random_parts(8, 64), dtype=torch.float32)
    torch.library.opcheck(decode, (layer.qdata, layer.scale, layer.global_scale, torch.bfloat16))
