"""The kernel's codes against `state_ops.nearest_code`, next to every midpoint and over all magnitudes.

A code may differ only where y lies within 1e-5 of a midpoint (the contract): the encoder's lines are fitted to 5e-6.
"""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from halfbyte.optim.formats import codebook, midpoints
from halfbyte.optim.kernels.codec_triton import (
    BIN_BITS,
    STRETCH,
    codec_tables,
    decode_e4m3,
    decode_linear,
    decode_signed_8bit,
    decode_unsigned_8bit,
    encode_by_line,
    encode_e4m3,
    encode_linear,
    from_lane,
    load_lane,
    look_up,
)
from halfbyte.optim.state_ops import nearest_code

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAST = torch.cuda.is_available()
SIZE = 1024


@triton.jit
def _encode(
    y_at, code_at, codec, num,
    PLACE: tl.constexpr, STRETCH: tl.constexpr, BIN_BITS: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    y = tl.load(y_at + at, mask=at < num, other=0.0)
    if KIND == "line":
        low, high = tl.load(codec + PLACE + 2), tl.load(codec + 6)
        code = encode_by_line(y * STRETCH, low, high, BIN_BITS, FAST).to(tl.uint8)
    elif KIND == "linear":
        code = encode_linear(y, FAST).to(tl.uint8)
    else:
        code = encode_e4m3(y, KIND == "cast")
    tl.store(code_at + at, code, mask=at < num)


@triton.jit
def _decode(code_at, value_at, codec, num, PLACE: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    code = tl.load(code_at + at, mask=at < num, other=0)
    high = tl.load(codec + 6)
    lanes = load_lane(tl.load(codec + PLACE), high, FAST)
    if KIND == "table":
        value = look_up(tl.load(codec + PLACE + 1), high, code.to(tl.int32), FAST)
    elif KIND == "lane":
        value = from_lane(lanes, code.to(tl.int32), FAST)
    elif KIND == "signed":
        value = decode_signed_8bit(code, lanes, load_lane(tl.load(codec + PLACE) + 128, high, FAST), FAST)
    elif KIND == "unsigned":
        value = decode_unsigned_8bit(code, lanes, FAST)
    elif KIND == "linear":
        value = decode_linear(code)
    else:
        value = decode_e4m3(code, KIND == "cast")
    tl.store(value_at + at, value, mask=at < num)


def _encoded(y: Tensor, kind: str, name: str = "8bit", signed: bool = True) -> Tensor:
    y = y.to(DEVICE)
    codes = torch.full(y.shape, 99, dtype=torch.uint8, device=DEVICE)
    _encode[(triton.cdiv(y.numel(), SIZE),)](
        y, codes, codec_tables(name, torch.device(DEVICE))[0], y.numel(), PLACE=0 if signed else 3,
        STRETCH=STRETCH.get((name, signed), 1.0), BIN_BITS=BIN_BITS.get((name, signed), 0), KIND=kind, FAST=FAST,
    )  # fmt: skip
    return codes.cpu()


def _samples(cuts: Tensor) -> Tensor:
    """Magnitudes down to 2^-40 evenly in the exponent, and floats around every midpoint, both signs; 0, 1."""
    generator = torch.Generator().manual_seed(1)
    wide = (torch.rand(60_000, generator=generator) * -40).exp2()
    flat = torch.rand(60_000, generator=generator)
    steps = torch.tensor([-500, -90, -3, -1, 0, 1, 3, 90, 500], dtype=torch.int32)
    near = (cuts.view(torch.int32)[:, None] + steps).reshape(-1).view(torch.float32)
    edges = torch.tensor([0.0, -0.0, 1.0, 1e-38, 1e-45, 2**-24, 0.1, 0.01, 0.001])
    return torch.cat([wide, -wide, flat, -flat, near, edges, -edges]).clamp(-1.0, 1.0)


@pytest.mark.parametrize(("name", "signed"), [*STRETCH, ("4bit", False)])
def test_encode(name: str, signed: bool) -> None:
    cuts = midpoints(name, signed)
    y = _samples(cuts)
    y = y if signed else y.abs()
    codes = _encoded(y, "line" if (name, signed) in STRETCH else "linear", name, signed)
    expected = nearest_code(y, name, signed=signed)
    if name == "8bit" and not signed:  # rule 1: only 0 has code 0
        expected = torch.maximum(expected, (y > 0).to(torch.uint8))
    differs = codes != expected
    assert (codes[differs].int() - expected[differs].int()).abs().sum() == differs.sum()
    distance = (y[differs, None] - cuts).abs().amin(1)
    assert (distance <= 1e-5 * y[differs].abs()).all()
    linear = name == "4bit" and not signed
    assert not differs.any() or not linear, "a linear map is exact"


def test_encode_e4m3_on_bits() -> None:
    """Exact, ties to even: all codes, the middles between them and their neighbours, as torch casts."""
    values = codebook("fp8", True)
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    steps = torch.tensor([-1, 0, 1], dtype=torch.int32)
    y = torch.cat([values, (middles.view(torch.int32)[:, None] + steps).reshape(-1).view(torch.float32)])
    y = torch.cat([y, _samples(values), 448 * _samples(values)])
    y = y[y.isfinite() & (y.abs() <= 448)]
    expected = y.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(_encoded(y, "bits"), expected)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        assert torch.equal(_encoded(y, "cast"), expected)


@pytest.mark.parametrize(
    ("name", "signed", "kind"),
    [
        ("8bit", True, "table"),
        ("8bit", False, "table"),
        ("8bit", True, "signed"),
        ("8bit", False, "unsigned"),
        ("4bit", True, "lane"),
        ("4bit", False, "linear"),
        ("fp8", True, "bits"),
    ],
)
def test_decode(name: str, signed: bool, kind: str) -> None:
    """Exact, but for 4 ulp where a value is computed from its decade."""
    expected = codebook(name, signed)
    codes = torch.arange(expected.numel(), dtype=torch.uint8, device=DEVICE)
    values = torch.full(expected.shape, torch.nan, device=DEVICE)
    codec = codec_tables(name, torch.device(DEVICE))[0]
    _decode[(1,)](codes, values, codec, codes.numel(), PLACE=0 if signed else 3, KIND=kind, FAST=FAST)
    finite = expected.isfinite()
    rtol = 4e-7 if kind in ("signed", "unsigned") else 0.0
    torch.testing.assert_close(values.cpu()[finite], expected[finite], rtol=rtol, atol=0.0)
