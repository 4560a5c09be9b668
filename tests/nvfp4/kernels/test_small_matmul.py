"""Products with few rows against float64.

All three kernels add fp32 products of exact operands: K terms, each rounding 2^-24 of the running sum, so 1e-5 of the
result's norm before the last rounding, which is to the dtype: 2^-9 for bf16 (twice that through the interpreter, which
truncates), 2^-11 for fp16.
"""

import pytest
import torch
from torch import Tensor

from halfbyte.nvfp4 import NVFP4Parts, dequantize
from tests.nvfp4.kernels.parts import random_parts

TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
CASES = [((1, 16), False), ((5, 48), True), ((130, 1104), True)]


def check(kernel_name: str, m: int, shape: tuple[int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    """The kernel's result, in memory that held NaN, against the product in float64."""
    from halfbyte.nvfp4.kernels import few_rows_triton, matvec_triton, small_matmul_triton

    kernel = {
        "matvec": matvec_triton.matvec_into,
        "few_rows": few_rows_triton.few_rows_into,
        "small_matmul": small_matmul_triton.small_matmul_into,
    }[kernel_name]
    parts = random_parts(*shape, device=device)
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(m, shape[1], generator=generator).to(device, dtype)
    offset = torch.randn(shape[0], generator=generator).to(device, dtype) if bias else None
    out = torch.full((m, shape[0]), float("nan"), dtype=dtype, device=device)
    kernel(out, x, parts.qdata, parts.scale.view(torch.uint8), parts.global_scale, offset)
    want = expected(parts, x, offset)
    assert (out.double() - want).norm() <= TOLERANCE[dtype] * want.norm()


def expected(parts: NVFP4Parts, x: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ dequantize(parts).double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "bias"), CASES, ids=str)
def test_matvec(shape: tuple[int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    check("matvec", 1, shape, dtype, bias, device)


def test_matvec_of_a_row_that_begins_anywhere(device: str) -> None:
    from halfbyte.nvfp4.kernels.matvec_triton import matvec

    parts = random_parts(5, 48, device=device)
    components = (parts.qdata, parts.scale.view(torch.uint8), parts.global_scale, None)
    buffer = torch.randn(1, 49, device=device).half()
    assert torch.equal(matvec(buffer[:, 1:], *components), matvec(buffer[:, 1:].clone(), *components))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "bias"), CASES, ids=str)
@pytest.mark.parametrize("m", [1, 7, 33, 64])
def test_small_matmul(m: int, shape: tuple[int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bf16 in a dot")
    check("small_matmul", m, shape, dtype, bias, device)


def test_subnormal_block_scales(device: str) -> None:
    """The smallest codes times the smallest scales are exact in fp16 too."""
    from halfbyte.nvfp4.kernels.small_matmul_triton import small_matmul

    scale = torch.arange(1, 9, dtype=torch.uint8, device=device).view(-1, 1)
    qdata = torch.full((8, 8), 0x11, dtype=torch.uint8, device=device)  # all 0.5
    x = torch.ones(1, 16, dtype=torch.float16, device=device)
    y = small_matmul(x, qdata, scale, torch.tensor(1.0, device=device), None)
    assert torch.equal(y.float(), 8 * scale.view(torch.float8_e4m3fn).float().T)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "bias"), CASES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 7, 8])
def test_few_rows(m: int, shape: tuple[int, int], dtype: torch.dtype, bias: bool, device: str) -> None:
    check("few_rows", m, shape, dtype, bias, device)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_every_code_times_every_scale_is_exact(dtype: torch.dtype, device: str) -> None:
    """Rows of x pick a column each, of a block whose scale is one of the 254 numbers; the scale's NaNs stay NaN."""
    from halfbyte.nvfp4.kernels.few_rows_triton import few_rows

    codes = torch.arange(16, dtype=torch.uint8, device=device)
    one = torch.tensor(1.0, device=device)
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8, device=device)
    for some in numbers.split(8):
        qdata = (codes * 17).view(-1, 1).expand(16, 8 * some.numel()).contiguous()
        scale = some.expand(16, -1).contiguous()
        want = dequantize(NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), one))[:, ::16].T
        rows = torch.arange(some.numel(), device=device)
        x = torch.zeros(some.numel(), 16 * some.numel(), dtype=dtype, device=device)
        x[rows, 17 * rows] = 1
        assert torch.equal(few_rows(x, qdata, scale, one, None).float(), want)
    nan = torch.tensor([[0x38], [0x7F], [0xFF]], dtype=torch.uint8, device=device)
    y = few_rows(torch.ones(2, 16, dtype=dtype, device=device), qdata[:3, :8].contiguous(), nan, one, None)
    assert y.isnan().tolist() == 2 * [[False, True, True]]


@pytest.mark.parametrize("m", [3, 8])
def test_few_rows_in_pieces(m: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K cut for several programs, the last with less to do; sizes at which whole steps are taken and not."""
    from halfbyte.nvfp4.kernels import few_rows_triton

    monkeypatch.setattr(few_rows_triton, "num_pieces", lambda *_: 3)
    for k in (4096, 4112, 5120):
        check("few_rows", m, (40, k), torch.float16, True, device)
