"""E2M1 and E4M3 in Triton, by bits: no table, and no fp8 type, which compute capability 8.0 lacks.

A small float is a large one whose exponent starts elsewhere. E2M1's exponent and mantissa, put where fp32 has the
lowest two exponent bits and the highest mantissa bit, read as value * 2^-126, 0.5 as the subnormal it becomes
included; one exact product brings it back. E4M3 likewise reads as value * 2^-120. The kernels are compiled without
flush-to-zero, which is Triton's default. Rejected: a gather from a table of sixteen (shared memory, one access a value)
and selects (a dozen instructions a value).
"""

import triton
import triton.language as tl

E2M1_OFFSET = tl.constexpr(2.0**126)
E4M3_OFFSET = tl.constexpr(2.0**120)
INTEGERS_FROM = tl.constexpr(2.0**23)  # from here on fp32 holds integers only, so adding it rounds half to even
INTEGERS_FROM_BITS = tl.constexpr(150 << 23)
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
E4M3_MAX = tl.constexpr(448.0)
E2M1_MAX = tl.constexpr(6.0)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def e2m1_bits_to_float(word):
    """int32 with a code in the top four bits (the rest is ignored) -> fp32 value * 2^-126.

    The arithmetic shift brings the magnitude to its place and fills the bits above with the sign: one mask keeps both.
    """
    return ((word >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float(word):
    """int32 with a code in the top four bits (the rest is ignored) -> fp32 value, exact; -0 stays."""
    return e2m1_bits_to_float(word) * E2M1_OFFSET


@triton.jit
def e4m3_to_float(byte):
    """int32 in 0..255 -> fp32 values, exact; 0x7F and 0xFF are NaN."""
    bits = ((byte & 0x7F) << 20) | ((byte & 0x80) << 24)
    bits = tl.where((byte & 0x7F) == 0x7F, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True) * E4M3_OFFSET


@triton.jit
def float_to_e4m3(value):
    """fp32 in [2^-6, 448] or NaN -> int32 bytes, nearest, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return tl.where(value == value, rounded - (120 << 3), 0x7F)


@triton.jit
def magnitude_code(magnitude):
    """fp32 >= 0 -> int32 codes 0..7, nearest, ties to the even code, 7 for all beyond 5.

    The line of codes bends at 2 and 4 (numerics/e2m1.py): round each piece, take the smallest. The rounding is an
    addition: the sum is an integer in the low bits of its own mantissa. Positive floats compare as their bits do, and
    integers have a minimum of three in one instruction.
    """
    halves = tl.fma(magnitude, 2.0, INTEGERS_FROM).to(tl.int32, bitcast=True)
    ones = (magnitude + (INTEGERS_FROM + 2)).to(tl.int32, bitcast=True)
    twos = tl.fma(magnitude, 0.5, INTEGERS_FROM + 4).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(halves, ones), tl.minimum(twos, INTEGERS_FROM_BITS + 7)) & 7
