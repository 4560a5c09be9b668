"""The numba codecs against torch's casts and `state_ops`: bit for bit, over whole code ranges and hard blocks."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from numba import njit

from halfbyte.optim import state_ops
from halfbyte.optim.formats import FORMATS, SCALE_MIN, StateFormat, codebook, midpoints, zero_code
from halfbyte.optim.kernels import codec_cpu, codec_cpu_cast, codec_cpu_portable, codec_cpu_vector
from halfbyte.optim.kernels.codec_cpu import FORMAT_CODE


@njit
def _map(function, x, out):
    for i in range(x.size):
        out[i] = function(x[i])


FORMS = [
    pytest.param(codec_cpu_portable, id="portable"),
    pytest.param(
        codec_cpu_vector,
        id="vector",
        marks=pytest.mark.skipif(not codec_cpu_vector.has_permutes(), reason="the CPU has no AVX-512 VBMI"),
    ),
]


@njit
def _scales(largest, fmt, scales):
    for block in range(scales.size):
        scales[block] = codec_cpu.scale_of(largest[block], fmt)


@njit
def _encode(encode, x, scales, block_size, codes):
    """Ten blocks to a tile."""
    for block in range(0, scales.size, 10):
        lo, hi = block * block_size, (block + 10) * block_size
        encode(x[lo:hi], scales[block : block + 10], block_size, codes[lo:hi])


@njit
def _decode(decode, codes, scales, block_size, x):
    decode(codes, scales, block_size, x)


@functools.cache
def of_form(form, direction: str, name: str, signed: bool):
    """`encoder` or `decoder` of one of FORMS; compiled once."""
    return getattr(form, direction)(name, signed)


@functools.cache
def coder(codec, name: str, signed: bool):
    """`codec_cpu.encode` or `.decode` for one format; compiled once."""
    fmt_code = FORMAT_CODE[name]

    @njit
    def code(source, scales, block_size, target):
        codec(source, scales, block_size, fmt_code, signed, target)

    return code


@njit
def _pack(codes, packed):
    codec_cpu.pack(codes, packed)


@njit
def _unpack(packed, codes):
    codec_cpu.unpack(packed, codes)


def quantize(x: Tensor, fmt: StateFormat, signed: bool, form=None) -> tuple[Tensor, Tensor]:
    """By one of FORMS, or by the one that codec_cpu chooses."""
    encode = coder(codec_cpu.encode, fmt.name, signed) if form is None else of_form(form, "encoder", fmt.name, signed)
    codes = np.full(x.numel(), 77, np.uint8)
    scales = np.full(fmt.num_blocks(x.numel()), np.nan, np.float32)
    _scales(state_ops.block_amax(x, fmt.block_size).numpy().view(np.uint32), FORMAT_CODE[fmt.name], scales)
    _encode(encode, x.numpy(), scales, fmt.block_size, codes)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def dequantize(codes: Tensor, scales: Tensor, fmt: StateFormat, signed: bool, form=None) -> Tensor:
    decode = coder(codec_cpu.decode, fmt.name, signed) if form is None else of_form(form, "decoder", fmt.name, signed)
    values = np.full(codes.numel(), np.nan, np.float32)
    _decode(decode, codes.numpy(), scales.numpy(), fmt.block_size, values)
    return torch.from_numpy(values)


def cast(function, x: np.ndarray, dtype) -> Tensor:
    out = np.empty(x.size, dtype)
    _map(function, x, out)
    return torch.from_numpy(out)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, counting NaN as equal to NaN and -0 as different from 0."""
    number = ~b.isnan()
    return (
        torch.equal(a.isnan(), ~number)
        and torch.equal(a[number].signbit(), b[number].signbit())
        and torch.equal(a[number], b[number])
    )


def floats() -> Tensor:
    """One fp32 pattern in 4001, and every fp16 with its neighbourhood of ties."""
    sweep = torch.from_numpy(np.arange(0, 2**32, 4001, dtype=np.uint64).astype(np.uint32).view(np.float32))
    half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    return torch.cat([sweep, half, half * (1 + 2**-11), half * (1 + 2**-10)])


@pytest.mark.parametrize("name", ["bf16", "half"])
def test_casts_of_16_bits_are_torchs(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "half": torch.float16}[name]
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    widened = cast(getattr(codec_cpu_cast, f"{name}_to_float"), patterns.numpy().view(np.uint16), np.float32)
    assert same(widened, patterns.view(dtype).float())
    narrowed = cast(getattr(codec_cpu_cast, f"float_to_{name}"), floats().numpy(), np.uint16)
    assert same(narrowed.view(torch.int16).view(dtype), floats().to(dtype))


def test_casts_of_e4m3_are_torchs() -> None:
    patterns = torch.arange(256, dtype=torch.uint8)
    numbers = patterns[~patterns.view(torch.float8_e4m3fn).float().isnan()]
    widened = cast(codec_cpu_cast.e4m3_to_float, numbers.numpy(), np.float32)
    assert same(widened, numbers.view(torch.float8_e4m3fn).float())
    x = floats()
    x = x[x.isfinite()]
    codes = cast(codec_cpu_cast.float_to_e4m3, x.numpy(), np.uint8)
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def blocks(fmt: StateFormat, signed: bool) -> Tensor:
    """Blocks that are ordinary, heavy-tailed, sparse, tiny, zero, and full of ties and near-ties with midpoints."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(400 * fmt.block_size, generator=generator)
    decades = 10 ** torch.empty_like(normal).uniform_(-8, 0, generator=generator)
    sparse = torch.empty_like(normal).uniform_(generator=generator) < 0.05
    kinds = [normal, normal * decades, normal * sparse, normal**3 * 1e-12, normal * 1e20, normal * 1e-31, normal * 0]
    if fmt.name != "fp8":
        cuts = midpoints(fmt.name, signed)
        around = torch.cat([cuts, torch.nextafter(cuts, cuts * 2), torch.nextafter(cuts, cuts * 0)])
        for scale in (1.0, 0.75, 3e-5, SCALE_MIN):
            padded = torch.nn.functional.pad(around, (0, -around.numel() % (fmt.block_size - 1)))
            with_top = torch.nn.functional.pad(padded.view(-1, fmt.block_size - 1), (1, 0), value=1.0)
            kinds.append(with_top.flatten() * scale)
    x = torch.cat(kinds)
    return x if signed else x.abs()


def assert_is_the_definition(x: Tensor, fmt: StateFormat, signed: bool, form=None) -> None:
    codes, scales = quantize(x, fmt, signed, form)
    expected, expected_scales = state_ops.quantize(x, fmt, signed=signed)
    unpacked = state_ops.unpack(expected, x.numel()) if fmt.bits == 4 else expected
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, unpacked)
    values = dequantize(codes, scales, fmt, signed, form)
    assert torch.equal(values, state_ops.dequantize(expected, expected_scales, fmt, x.numel(), signed=signed))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_values_are_the_definitions(name: str, signed: bool) -> None:
    assert_is_the_definition(blocks(FORMATS[name], signed), FORMATS[name], signed)


@pytest.mark.parametrize("block_size", [64, 100, 128, 256])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["8bit", "4bit"])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_the_definition(form, name: str, signed: bool, block_size: int) -> None:
    """Whichever this CPU would choose; 100 leaves a remainder of every block."""
    fmt = FORMATS[name].with_block_size(block_size)
    assert_is_the_definition(blocks(fmt, signed), fmt, signed, form)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["8bit", "4bit"])
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_right_between_the_hard_values_too(form, name: str, signed: bool) -> None:
    """4e6 values spread evenly over the patterns of [1e-8, 1], each block with a 1.

    The portable form in blocks of two: so few values beside each other rarely call the exact table for one another's
    sake, which checks EPSILON itself. The other one in groups of 64, as it is used.
    """
    fmt = FORMATS[name].with_block_size(2 if form is codec_cpu_portable else 64)
    low, high = (np.float32(x).view(np.uint32) for x in (1e-8, 1.0))
    spread = torch.from_numpy(np.linspace(low, high, 63 * 64_000).astype(np.uint32).view(np.float32))
    spread = spread.view(-1, fmt.block_size - 1)
    for factor in (1.0, 0.7, 1.9e-7) if signed else (1.0, 1.3e-9):
        x = torch.cat([torch.ones_like(spread[:, :1]), -spread if factor == 0.7 else spread], dim=1).flatten() * factor
        codes, _ = quantize(x, fmt, signed, form)
        expected, _ = state_ops.quantize(x, fmt, signed=signed)
        assert torch.equal(codes, state_ops.unpack(expected, x.numel()) if name == "4bit" else expected)


@pytest.mark.parametrize("numel", [1, 63, 64, 256, 1000])
@pytest.mark.parametrize("name", ["8bit", "4bit"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_written_beyond_the_last_value(form, name: str, numel: int) -> None:
    """Every code, in both directions, inside larger buffers."""
    table = codebook(name, True).numpy()
    codes, scales = np.resize(np.arange(table.size, dtype=np.uint8)[::-1], numel), np.ones(1, np.float32)
    x = np.full(numel + 64, np.nan, np.float32)
    _decode(form.decoder(name, True), codes, scales, numel, x[:numel])
    assert (x[:numel] == table[codes]).all() and np.isnan(x[numel:]).all()
    again = np.full(numel + 64, 77, np.uint8)
    _encode(form.encoder(name, True), x[:numel], scales, numel, again[:numel])
    assert (again[:numel] == codes).all() and (again[numel:] == 77).all()


@pytest.mark.parametrize("numel", [1, 2, 7, 128])
def test_nibbles(numel: int) -> None:
    codes = torch.randint(0, 16, (numel,), dtype=torch.uint8)
    packed = np.full((numel + 1) // 2, 255, np.uint8)
    _pack(codes.numpy(), packed)
    assert torch.equal(torch.from_numpy(packed), state_ops.pack(codes))
    again = np.full(numel, 255, np.uint8)
    _unpack(packed, again)
    assert torch.equal(torch.from_numpy(again), codes)


def test_a_zero_block_has_zero_codes() -> None:
    for name, fmt in FORMATS.items():
        for signed in (True, False):
            codes, scales = quantize(torch.zeros(fmt.block_size), fmt, signed)
            assert (codes == zero_code(name, signed)).all()
            assert (scales == torch.tensor(SCALE_MIN) / fmt.code_max).all()
