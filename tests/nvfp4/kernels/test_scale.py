"""The kernel against PyTorch's multiplication, bit for bit: one product and one rounding in both."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 4097), (0, 16)], ids=str)
def test_equal_to_torch(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    from halfbyte.nvfp4.kernels.scale_triton import scale_into

    product = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    product[:, ::3] *= 1e-6  # subnormal in fp16
    factor = torch.tensor(0.37)
    out = torch.full(shape, float("nan"), dtype=dtype, device=device)
    scale_into(out, product.to(device), factor.to(device))
    want = (product * factor).to(dtype)
    if dtype == torch.bfloat16 and device == "cpu":  # Triton's interpreter cuts bf16 off: one step of it
        assert ((out.float() - want.float()).abs() <= want.float().abs() * 2**-7).all()
    else:
        assert torch.equal(out.cpu(), want)


def test_nan_and_infinity_stay(device: str) -> None:
    from halfbyte.nvfp4.kernels.scale_triton import scale

    product = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=device)
    found = scale(product, torch.tensor(2.0, device=device), torch.bfloat16).cpu()
    assert found[0].isnan() and found[1:].tolist() == [float("inf"), -float("inf"), 0.0]
    assert torch.signbit(found[3])
