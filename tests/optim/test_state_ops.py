"""The codec against the tables searched in fp64, and its two rules."""

import pytest
import torch

from halfbyte.optim.formats import FORMATS, SCALE_MIN, codebook, midpoints, zero_code
from halfbyte.optim.state_ops import (
    PIECE,
    block_amax,
    dequantize,
    nearest_code,
    pack,
    quantize,
    quantize_finite_,
    unpack,
)

BOTH = [(name, signed) for name in FORMATS for signed in (True, False)]
TABLES = [(name, signed) for name, signed in BOTH if name != "fp8"]


@pytest.mark.parametrize("name, signed", TABLES)
def test_nearest_code_is_a_search_over_midpoints(name: str, signed: bool) -> None:
    """All 65,536 bfloat16 prefixes with their first and last fp32 value, the codes, the midpoints and both of their
    neighbours: every place where the lookup could go wrong. In the unsigned 8-bit map only 0 has code 0 (rule 1)."""
    prefix = torch.arange(-32768, 32768, dtype=torch.int32) << 16
    edges = torch.cat([prefix, prefix + 65535]).view(torch.float32)
    cuts = midpoints(name, signed)
    near = [cuts, cuts.nextafter(torch.tensor(9.0)), cuts.nextafter(torch.tensor(-9.0)), codebook(name, signed)]
    y = torch.cat([edges[edges.isfinite()], *near])
    y = y if signed else y[~y.signbit()]
    y = y[y <= 1] if name == "4bit" and not signed else y
    expected = torch.bucketize(y, cuts, right=True)
    if name == "8bit" and not signed:
        expected = expected.maximum((y > 0).long())
    assert torch.equal(nearest_code(y, name, signed=signed).long(), expected)


@pytest.mark.parametrize("name", ["8bit", "4bit"])
@pytest.mark.parametrize("numel", [1, 3, 17, 64])
def test_negative_zero_has_the_code_of_zero(name: str, numel: int) -> None:
    """Its pattern is the one integer whose magnitude wraps around, in vectors and in what is left of them."""
    y = torch.full((numel,), -0.0)
    assert (nearest_code(y, name, signed=True) == zero_code(name, True)).all()


@pytest.mark.parametrize("name, signed", BOTH)
@pytest.mark.parametrize("numel", [4096, 4097, 33])
@pytest.mark.parametrize("top", [1e-30, 0.5, 1.0, 1.0000001, 2.0, 4.0, 3e38])
def test_finite_values_in_place_are_quantized_alike(name: str, signed: bool, numel: int, top: float) -> None:
    """With the largest amax known, rule 1 is left to the table where that is at most 1: denormals beside every top."""
    fmt = FORMATS[name].with_block_size(128)
    x = torch.arange(numel, dtype=torch.int32).mul(12345).remainder(2**24).view(torch.float32)
    x[::128] = top
    x[5], x[6] = 1e-45, 0.0
    x = x.clamp(max=top) * (torch.arange(numel) % 3 - 1) if signed else x.clamp(max=top)
    codes, scale = torch.full((fmt.num_bytes(numel),), 77, dtype=torch.uint8), torch.full((fmt.num_blocks(numel),), 7.0)
    expected = quantize(x, fmt, signed=signed)
    amax = block_amax(x, 128, signed=signed)
    quantize_finite_(x.clone(), amax, fmt, codes, scale, signed=signed, largest=float(amax.max()))
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])
    if not signed and fmt.bits == 8:
        assert torch.equal(codes > 0, x > 0)


@pytest.mark.parametrize("numel", [256, 255, 1])
def test_packed_codes_are_unpacked(numel: int) -> None:
    """Every pair of codes, the even one in the high nibble."""
    codes = torch.stack([torch.arange(256) >> 4, torch.arange(256) & 15], 1).flatten()[: 2 * numel - 1].to(torch.uint8)
    assert torch.equal(pack(codes)[: numel - 1], torch.arange(numel - 1, dtype=torch.uint8))
    assert torch.equal(unpack(pack(codes), codes.numel()), codes)


@pytest.mark.parametrize("name, signed", BOTH)
@pytest.mark.parametrize("numel", [1, 2, 17, 255, 256, 257, 4097])
def test_every_size_decodes_to_the_nearest_value(name: str, signed: bool, numel: int) -> None:
    """No value is further from its own than the nearest entry of the codebook, but for rounding of y to fp32 (1e-6)
    and rule 1, which only lifts a positive value to the first code."""
    fmt = FORMATS[name].with_block_size(64)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    x = x if signed else x**2
    codes, scale = quantize(x, fmt, signed=signed)
    assert codes.dtype == torch.uint8 and codes.shape == (fmt.num_bytes(numel),)
    assert scale.dtype == torch.float32 and scale.shape == (fmt.num_blocks(numel),)
    decoded = dequantize(codes, scale, fmt, numel, signed=signed)
    table = codebook(name, signed).double()
    table = table[table.isfinite()]
    scale = scale.repeat_interleave(64)[:numel].double()
    best = (x.double().unsqueeze(1) / scale.unsqueeze(1) - table).abs().amin(1) * scale
    lifted = table[table > 0].min() * scale * (not signed)
    assert ((decoded - x).abs() <= torch.maximum(best, lifted) + 1e-6 * scale * fmt.code_max).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("small", [1e-3, 1e-9, 1e-20, 1e-38, 1e-45])
@pytest.mark.parametrize("large", [1.0, 1e-20, 1e30, 3e38])
def test_rule_1_a_positive_second_moment_stays_positive(name: str, small: float, large: float) -> None:
    fmt = FORMATS[name]
    x = torch.full((fmt.block_size + 1,), small)
    x[0] = large
    codes, scale = quantize(x, fmt, signed=False)
    decoded = dequantize(codes, scale, fmt, x.numel(), signed=False)
    assert (decoded > 0).all() and decoded.isfinite().all()


@pytest.mark.parametrize("name, signed", BOTH)
@pytest.mark.parametrize("amax", [3e38, 1e30, 1e-12, 1e-20, 1e-29])
def test_rule_2_scales_follow_the_block(name: str, signed: bool, amax: float) -> None:
    """A block's codes do not depend on its magnitude, from 1e-29 up: relative difference of two decodings 1e-5."""
    fmt = FORMATS[name]
    x = torch.rand(fmt.block_size, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.1
    x[7] = 1.0
    codes, scale = quantize(x, fmt, signed=signed)
    scaled_codes, scaled_scale = quantize(x * amax, fmt, signed=signed)
    torch.testing.assert_close(
        dequantize(scaled_codes, scaled_scale, fmt, x.numel(), signed=signed).double() / amax,
        dequantize(codes, scale, fmt, x.numel(), signed=signed).double(),
        rtol=1e-5,
        atol=0.08 if name == "4bit" else 1e-2,  # a value beside a midpoint may take the other side
    )
    assert torch.equal(codes, scaled_codes) or (codes != scaled_codes).float().mean() < 0.02


@pytest.mark.parametrize("name, signed", BOTH)
def test_zero_block(name: str, signed: bool) -> None:
    """Decodes to 0, or (unsigned 4-bit has no zero) to less than what eps 1e-15 hides after the square root."""
    fmt = FORMATS[name]
    codes, scale = quantize(torch.zeros(300), fmt, signed=signed)
    decoded = dequantize(codes, scale, fmt, 300, signed=signed)
    assert (decoded == 0).all() or (decoded.sqrt() <= 1e-15).all()
    assert (scale * fmt.code_max >= SCALE_MIN * 0.999).all()


@pytest.mark.parametrize("name, signed", BOTH)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_touches_no_neighbour(name: str, signed: bool, poison: float) -> None:
    fmt = FORMATS[name]
    x = torch.rand(300, generator=torch.Generator().manual_seed(1))
    x[5] = 0.0
    clean = dequantize(*quantize(x, fmt, signed=signed), fmt, 300, signed=signed)
    x[5] = poison
    decoded = dequantize(*quantize(x, fmt, signed=signed), fmt, 300, signed=signed)
    others = torch.arange(300) != 5
    assert torch.equal(clean[others], decoded[others])
    assert decoded[5] == (0 if signed else clean[: fmt.block_size].max())


def test_block_amax_of_tails() -> None:
    assert block_amax(torch.tensor([1.0, -3.0, 2.0]), 2).tolist() == [3.0, 2.0]
    assert block_amax(torch.tensor([-1.0]), 256).tolist() == [1.0]
    long = torch.randn(2**16 + 3, generator=torch.Generator().manual_seed(0))
    long[:5], long[[300, 900]] = -9.0, torch.tensor([torch.nan, -torch.inf])
    for block_size in (2, 33, 256):
        expected = torch.stack([block.abs().max() for block in long.split(block_size)])
        torch.testing.assert_close(block_amax(long, block_size), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name, block_size", [("8bit", 256), ("4bit", 33), ("fp8", 2**20), ("8bit", 2**23)])
def test_long_tensors_are_quantized_piece_by_piece(name: str, block_size: int) -> None:
    """A little more than a piece: the pieces' codes and scales are those of the blocks on their own."""
    fmt = FORMATS[name].with_block_size(block_size)
    x = torch.randn(PIECE + 77, generator=torch.Generator().manual_seed(0))
    x[-1] = torch.nan
    codes, scale = quantize(x, fmt, signed=True)
    assert scale.numel() == fmt.num_blocks(x.numel()) and codes.numel() == fmt.num_bytes(x.numel())
    decoded = dequantize(codes, scale, fmt, x.numel(), signed=True)
    start = (x.numel() - 1) // (2 * block_size) * 2 * block_size
    tail = dequantize(*quantize(x[start:], fmt, signed=True), fmt, x.numel() - start, signed=True)
    assert torch.equal(decoded[start:], tail) and decoded[-1] == 0
    assert (decoded[:-1] - x[:-1]).abs().max() <= 0.13 * x[:-1].abs().max()
