"""The numba codecs against torch's casts and `state_ops`: bit for bit, over whole code ranges and hard blocks."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from numba import njit

from halfbyte.optim import state_ops
from halfbyte.optim.formats import FORMATS, SCALE_MIN, StateFormat, midpoints, zero_code
from halfbyte.optim.kernels import codec_cpu, codec_cpu_cast, codec_cpu_lookup
from halfbyte.optim.kernels.codec_cpu import FORMAT_CODE


@njit
def _map(function, x, out):
    for i in range(x.size):
        out[i] = function(x[i])


@njit
def _quantize(x, block_size, fmt, signed, codes, scales):
    """Ten blocks to a tile."""
    for block in range(scales.size):
        scales[block] = codec_cpu.scale_of(codec_cpu.amax_bits(x[block * block_size : (block + 1) * block_size]), fmt)
    for block in range(0, scales.size, 10):
        lo, hi = block * block_size, (block + 10) * block_size
        codec_cpu.encode(x[lo:hi], scales[block : block + 10], block_size, fmt, signed, codes[lo:hi])


@njit
def _dequantize(codes, scales, block_size, fmt, signed, x):
    codec_cpu.decode(codes, scales, block_size, fmt, signed, x)


@njit
def _pack(codes, packed):
    codec_cpu.pack(codes, packed)


@njit
def _unpack(packed, codes):
    codec_cpu.unpack(packed, codes)


def quantize(x: Tensor, fmt: StateFormat, signed: bool) -> tuple[Tensor, Tensor]:
    codes = np.full(x.numel(), 77, np.uint8)
    scales = np.full(fmt.num_blocks(x.numel()), np.nan, np.float32)
    _quantize(x.numpy(), fmt.block_size, FORMAT_CODE[fmt.name], signed, codes, scales)
    return torch.from_numpy(codes), torch.from_numpy(scales)


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


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_values_are_the_definitions(name: str, signed: bool) -> None:
    """Bits: the estimate of 8-bit codes is replaced by the exact table wherever it could be wrong."""
    fmt = FORMATS[name]
    x = blocks(fmt, signed)
    codes, scales = quantize(x, fmt, signed)
    expected, expected_scales = state_ops.quantize(x, fmt, signed=signed)
    unpacked = state_ops.unpack(expected, x.numel()) if fmt.bits == 4 else expected
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, unpacked)
    values = np.full(x.numel(), np.nan, np.float32)
    _dequantize(codes.numpy(), scales.numpy(), fmt.block_size, FORMAT_CODE[name], signed, values)
    reference = state_ops.dequantize(expected, expected_scales, fmt, x.numel(), signed=signed)
    assert torch.equal(torch.from_numpy(values), reference)


@pytest.mark.parametrize("signed", [True, False])
def test_the_estimate_is_right_wherever_it_claims_to_be(signed: bool) -> None:
    """Tiles of ten blocks of two, 1 and any of 4e6 values spread evenly over the patterns of [1e-8, 1].

    So few values beside each other rarely call the exact table for one another's sake: this checks EPSILON itself.
    """
    fmt = FORMATS["8bit"].with_block_size(2)
    low, high = (np.float32(x).view(np.uint32) for x in (1e-8, 1.0))
    spread = torch.from_numpy(np.linspace(low, high, 4_000_000).astype(np.uint32).view(np.float32))
    for factor in (1.0, 0.7, 1.9e-7) if signed else (1.0, 1.3e-9):
        x = torch.stack([torch.ones_like(spread), -spread if factor == 0.7 else spread], dim=1).flatten() * factor
        codes, _ = quantize(x, fmt, signed)
        expected, _ = state_ops.quantize(x, fmt, signed=signed)
        assert torch.equal(codes, expected)


@njit
def _look_up(codes, table, planes, x):
    codec_cpu_lookup.look_up(codes, table, planes, x)


@pytest.mark.parametrize("numel", [1, 63, 64, 256, 1000])
def test_looking_up_is_indexing(numel: int) -> None:
    """Every byte, whichever instructions do it; nothing is written beyond the last value."""
    table = np.random.default_rng(0).standard_normal(256).astype(np.float32)
    codes = np.resize(np.arange(256, dtype=np.uint8)[::-1], numel)
    x = np.full(numel + 64, np.nan, np.float32)
    _look_up(codes, table, codec_cpu_lookup.planes_of(table), x[:numel])
    assert (x[:numel] == table[codes]).all() and np.isnan(x[numel:]).all()


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
