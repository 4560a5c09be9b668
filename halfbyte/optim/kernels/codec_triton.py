"""Codes in a Triton kernel: computed from the bits of the float, never searched.

Encoding the dynamic maps. y = value / scale. The upper bits of y's fp32 pattern (sign, exponent and a few mantissa
bits) name a bin so narrow that the codebook's midpoints in it lie evenly spaced, as they do within a decade, so that

    code = floor(A[bin] * y + B[bin])

One 8-byte lookup, one FMA and one conversion a value; the few bins in use (some dozen of the upper decades) stay in
the L1 cache. y carries a factor STRETCH, which moves the bins so that where the spacing changes (at 0.1, 0.01, ... and
below 1.0) a bin ends; it is folded into the block's reciprocal scale and costs nothing. Lines are fitted in
`encode_table`, whose result differs from `state_ops.nearest_code` only where y lies within 5e-6 of a midpoint.

Decoding is one lookup in the codebook (1 KB). The unsigned 4-bit map is linear and needs no table, and E4M3 is a cast:
in hardware from compute capability 8.9, on bits before that.

Rejected: a binary search (8 dependent lookups a value: 9.2 ms where this kernel's floor is 4.1), the decade from six
comparisons (about 20 instructions more a value), a table over bfloat16 prefixes as the CPU paths have (too large for
the L1 cache).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.optim.formats import codebook, midpoints

STRETCH = {("8bit", True): 1.2575, ("8bit", False): 1.003, ("4bit", True): 1.0}
"""By (format, signed). Found by trying all of 1.000, 1.0005 ... 2; see `_fit_bin`."""

BIN_BITS = {("8bit", True): 2, ("8bit", False): 4, ("4bit", True): 1}
"""Mantissa bits that name a bin: the fewest for which a stretch exists."""

LEAST_EXPONENT = -26
"""Every positive midpoint is above 2**LEAST_EXPONENT."""

_TOLERANCE = 4e-6


def _fit_bin(cuts: Tensor, low: float, high: float, least_code: int) -> tuple[float, float]:
    """(A, B) such that floor(A y + B) is `least_code` at low and one more from each cut on; low <= y < high.

    cuts  fp64, the midpoints in (low, high), ascending.
    """
    num = cuts.numel()
    if num == 0:
        return 0.0, least_code + 0.5
    code = torch.arange(1, num + 1, dtype=torch.float64, device="cpu")
    slack = _TOLERANCE * cuts.abs()
    # A x + B >= code just above each cut and at low; A x + B < code just below each cut and at high
    at_least = torch.cat([cuts + slack, cuts.new_tensor([low])]), torch.cat([code, code.new_tensor([0.0])])
    below = torch.cat([cuts - slack, cuts.new_tensor([high])]), torch.cat([code, code.new_tensor([num + 1.0])])
    run = at_least[0][:, None] - below[0][None, :]
    slope = (at_least[1][:, None] - below[1][None, :]) / run
    steepest = float(slope[run < 0].min())
    flattest = max(0.0, float(slope[run > 0].max()))
    assert flattest < steepest, "the midpoints of this bin are not evenly spaced; choose another stretch"
    a = (flattest + steepest) / 2
    b = (float((at_least[1] - a * at_least[0]).max()) + float((below[1] - a * below[0]).min())) / 2
    return a, b + least_code


@lru_cache
def encode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """Lines of all bins: fp32 [num_bins, 2], by the upper 9 + BIN_BITS bits of y.

    Not for fp8 and the unsigned 4-bit map. Unsigned maps give no zero code: that is rule 1, and 0 is the caller's.
    """
    bin_bits = BIN_BITS[name, signed]
    num_bins = 2 ** (9 + bin_bits)
    prefix = torch.arange(num_bins, dtype=torch.int64, device="cpu")
    shift = 23 - bin_bits
    first = (prefix << shift).to(torch.int32).view(torch.float32)  # wraps to negative numbers in the upper half
    last = ((prefix << shift) + (1 << shift) - 1).to(torch.int32).view(torch.float32)
    lows, highs = torch.minimum(first, last), torch.maximum(first, last)
    cuts = midpoints(name, signed).double() * STRETCH[name, signed]
    least_code = 0
    if not signed:  # rule 1: no zero code, so no cut between codes 0 and 1
        cuts, least_code = cuts[1:], 1
    lines = []
    for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
        code = least_code + int((cuts <= low).sum())
        if abs(low) < 4 and max(abs(low), abs(high)) > 2.0**LEAST_EXPONENT:
            lines.append(_fit_bin(cuts[(cuts > low) & (cuts <= high)], low, high, code))
        else:  # next to zero, beyond the map, or NaN: no cut in this bin
            lines.append((0.0, code + 0.5))
    return torch.tensor(lines, dtype=torch.float32, device="cpu").to(device)


@lru_cache
def decode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """The codebook on a device: fp32 [256] or [16]."""
    return codebook(name, signed).to(device)


@triton.jit
def look_up(table, index, FAST: tl.constexpr):
    """table[index]: table a pointer to fp32, index int32 >= 0 of any shape. FAST: on a GPU, one address instruction."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 at; cvt.u64.u32 at, $1; add.s64 at, at, $2; ld.global.nc.f32 $0, [at]; }",
            "=f,r,l",
            [index * 4, table.to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + index)


@triton.jit
def _look_up_line(table, index, FAST: tl.constexpr):
    """(table[2 index], table[2 index + 1]); index int32 >= 0."""
    if FAST:
        a, b = tl.inline_asm_elementwise(
            "{ .reg .b64 at; cvt.u64.u32 at, $2; add.s64 at, at, $3; ld.global.nc.v2.f32 {$0, $1}, [at]; }",
            "=f,=f,r,l",
            [index * 8, table.to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return a, b
    return tl.load(table + 2 * index), tl.load(table + 2 * index + 1)


@triton.jit
def _truncate(x, FAST: tl.constexpr):
    """Integer part of x, in [0, 256): int32 whose low byte is the result; on a GPU by an addition that rounds down."""
    if FAST:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B000000;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x.to(tl.int32)


@triton.jit
def encode_by_line(y, table, BIN_BITS: tl.constexpr, FAST: tl.constexpr):
    """Code of y (stretched fp32, finite) by the line of its bin; table is `encode_table`'s address. int32, low byte."""
    a, b = _look_up_line(table, (y.to(tl.uint32, bitcast=True) >> (23 - BIN_BITS)).to(tl.int32), FAST)
    return _truncate(a * y + b, FAST)


@triton.jit
def encode_linear(y, FAST: tl.constexpr):
    """Code of the unsigned 4-bit map k / 16, k = 1..16, for y in [0, 1]; a tie goes up. int32, low byte."""
    return _truncate(tl.maximum(y * 16.0 - 0.5, 0.5), FAST)


@triton.jit
def decode_linear(code):
    """Value of the unsigned 4-bit map: (code + 1) / 16, fp32."""
    return code.to(tl.float32) * 0.0625 + 0.0625


@triton.jit
def encode_e4m3(y, NATIVE: tl.constexpr):
    """Bits of y (fp32, |y| <= 448 up to rounding) in E4M3, to nearest, ties to even. uint8."""
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: round to 3 mantissa bits and move the exponent's bias from 127 to 7. Subnormal (below 2^-6): adding 2^14
    # lets the addition itself round to multiples of 2^-9.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, tl.minimum(normal, 126))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """Value of an E4M3 code (uint8, not NaN), fp32."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120 moves the bias back


@triton.jit
def fast_sqrt(x, FAST: tl.constexpr):
    """sqrt(x) to 2 ulp; what is below the least normal number counts as that, so that eps = 0 divides by no zero."""
    x = tl.maximum(x, 1.1754943508222875e-38)
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt(x)


@triton.jit
def fast_reciprocal(x, FAST: tl.constexpr):
    """1 / x to 1 ulp; 0 beyond 2^126."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x
