"""Codes of one block, computed from the value: the numba form of `state_ops.quantize` and `dequantize`.

fp8     the cast of codec_cpu_cast.
4-bit   a count of comparisons with the eight positive midpoints (signed), one subtraction (unsigned: k/16).
8-bit   the dynamic map is a grid of equal cells in each decade, ten times finer and half as many cells one decade
        down. So "cell number against value" is a concave broken line, the minimum of seven straight lines: no search,
        no table, no decade to find. Where two decades meet, the boundary lies a fifth of a cell into the upper one. A
        block in which any value comes within EPSILON cells of a boundary (one block in twenty) is done again exactly,
        by a table on the upper 16 bits, so codes equal the definition's bit for bit. Rejected: the table for every
        block, 0.72 ns a value on a Zen 4 core where this is 0.5; comparing each close value only, 0.83.

All loops are over one block, plain and vectorizable; arrays are slices that the caller took.
"""

from typing import Any

import numpy as np
from numba import njit

from halfbyte.optim.formats import SCALE_MIN, codebook, midpoints
from halfbyte.optim.kernels.codec_cpu_cast import (
    ABS_MASK,
    F32,
    HELPER,
    U32,
    bits_of,
    e4m3_to_float,
    float_of,
    float_to_e4m3,
    helper,
)

I32 = np.int32
EIGHT, FOUR, FP8 = 0, 1, 2  # StateFormat.name, as the kernels take it
FORMAT_CODE = {"8bit": EIGHT, "4bit": FOUR, "fp8": FP8}

SIGNED_8BIT = codebook("8bit", True).numpy()
UNSIGNED_8BIT = codebook("8bit", False).numpy()
SIGNED_4BIT = codebook("4bit", True).numpy()
CUTS_4BIT = tuple(midpoints("4bit", True)[7:].numpy())  # the positive ones
MINUS_ZERO = U32(0x80000000)
ABOVE_MIN = U32(0x3400)  # bfloat16 pattern of 2^-23: every smaller |y| has the code of zero


def _prefix_table(signed: bool) -> np.ndarray:
    """What the upper 16 bits of |y| decide: [2945] uint32, from pattern ABOVE_MIN to that of 1.

    Such a prefix holds at most one midpoint. Entry = cell << 17 | (lower 16 bits of the midpoint, or 65536 for none):
    the cell, counted from zero's own, is one more from there on.
    """
    cuts = midpoints("8bit", signed).numpy()
    cuts = cuts[cuts > 0]
    first = np.arange(ABOVE_MIN, 0x3F81, dtype=np.uint32) << 16
    cell = np.searchsorted(cuts, first.view(np.float32), side="left")  # a midpoint may lie on the prefix itself
    cut_bits = np.append(cuts, np.float32(np.inf)).view(np.uint32)[cell]
    return (cell << 17 | np.where(cut_bits >> 16 == first >> 16, cut_bits & 0xFFFF, 65536)).astype(np.uint32)


SIGNED_PREFIXES = _prefix_table(True)
UNSIGNED_PREFIXES = _prefix_table(False)
SIGNED_TOP = F32(midpoints("8bit", True)[-1])
UNSIGNED_TOP = F32(midpoints("8bit", False)[-1])

EPSILON = F32(1e-4)  # cells: see _lines
STEP_IN = F32(0.2)  # cells: how far a decade's first boundary lies in it
estimate: Any = njit(**HELPER, fastmath={"contract"})  # may round as it comes


def _lines(cells_in_first: int) -> tuple[tuple, tuple]:
    """(slopes, offsets) of the seven decades: cell number = slope * |y| + offset, cells counted from zero's own.

    The offset of the last is 2e-5 high, so that y = 1 comes out beyond its last cell however it was rounded; with the
    rounding of y by a reciprocal scale, of slopes and of sums, 255 cells up, a position is wrong by at most 8e-5.
    """
    slopes, offsets = [], []
    for decade in range(7):
        cells = cells_in_first * 2**decade
        slopes.append(cells * 10.0 ** (6 - decade) / 0.9)
        offsets.append(cells - cells_in_first + 1 - 0.1 / 0.9 * cells)
    offsets[6] += 2e-5
    if cells_in_first == 1:
        # A signed map has one cell in its lowest decade, [2.75e-7, about 1e-6). This line crosses its lower boundary at
        # 1.2 cells, like any decade's first boundary, and meets the next line at 1e-6.
        slopes[0], offsets[0] = 0.8e6 / 0.725, 2 - 0.8 / 0.725
    return tuple(map(F32, slopes)), tuple(map(F32, offsets))


SIGNED_SLOPES, SIGNED_OFFSETS = _lines(1)
UNSIGNED_SLOPES, UNSIGNED_OFFSETS = _lines(2)


@estimate
def _position(y, slopes, offsets):
    """Where |y| lies, in cells: the least of seven lines."""
    t = y * slopes[0] + offsets[0]
    line = y * slopes[1] + offsets[1]
    t = line if line < t else t
    line = y * slopes[2] + offsets[2]
    t = line if line < t else t
    line = y * slopes[3] + offsets[3]
    t = line if line < t else t
    line = y * slopes[4] + offsets[4]
    t = line if line < t else t
    line = y * slopes[5] + offsets[5]
    t = line if line < t else t
    line = y * slopes[6] + offsets[6]
    return line if line < t else t


@helper
def _least_with(y, scale):
    """The least x with x / scale >= y."""
    x = y * scale
    while x / scale >= y:
        x = float_of(U32(bits_of(x) - U32(1)))
    while x / scale < y:
        x = float_of(U32(bits_of(x) + U32(1)))
    return x


@estimate
def _estimate_signed(x, scale, codes):
    """Codes, and the least distance (in cells) of a value to a boundary; kept as bits, whose minimum vectorizes."""
    scale_inv, top = F32(1) / scale, _least_with(SIGNED_TOP, scale)
    nearest = bits_of(F32(1))
    for i in range(x.size):
        t = _position(abs(x[i]) * scale_inv, SIGNED_SLOPES, SIGNED_OFFSETS)
        cell = I32(t)
        share = t - F32(cell)
        above = share - (STEP_IN if I32(cell & I32(cell - I32(1))) == 0 else F32(0))
        cell = I32(cell - I32(above < F32(0)))
        above, below = abs(above), F32(1) - share
        distance = bits_of(above if above < below else below)
        nearest = distance if distance < nearest else nearest
        cell = I32(cell if x[i] > F32(0) else I32(-cell))
        codes[i] = np.uint8(I32(I32(cell + I32(127)) + I32(x[i] >= top)))
    return float_of(nearest)


@estimate
def _estimate_unsigned(x, scale, codes):
    scale_inv, top = F32(1) / scale, _least_with(UNSIGNED_TOP, scale)
    nearest = bits_of(F32(1))
    for i in range(x.size):
        t = _position(x[i] * scale_inv, UNSIGNED_SLOPES, UNSIGNED_OFFSETS)
        cell = I32(t)
        share = t - F32(cell)
        above = share - (STEP_IN if I32(cell & I32(cell + I32(1))) == 0 else F32(0))
        cell = I32(cell - I32(above < F32(0)))
        above, below = abs(above), F32(1) - share
        distance = bits_of(above if above < below else below)
        nearest = distance if distance < nearest else nearest
        least = I32(x[i] > F32(0))
        cell = cell if cell > least else least
        codes[i] = np.uint8(I32(cell + I32(x[i] >= top)))
    return float_of(nearest)


@helper
def _exact_8bit(x, scale, signed, codes):
    """Codes by table, as state_ops does it. A negative value on a midpoint takes the cell nearer to zero."""
    for i in range(x.size):
        bits = bits_of(x[i] / scale)
        negative = U32(bits >> U32(31))
        magnitude = U32(bits & ABS_MASK)
        prefix = U32(magnitude >> U32(16))
        place = U32((prefix if prefix > ABOVE_MIN else ABOVE_MIN) - ABOVE_MIN)
        entry = SIGNED_PREFIXES[place] if signed else UNSIGNED_PREFIXES[place]
        over = U32(magnitude & U32(0xFFFF)) >= U32(U32(entry & U32(0x1FFFF)) + negative)
        cell = I32(I32(entry >> U32(17)) + I32(over))
        if signed:
            below = I32(I32(127) - (cell if cell < I32(127) else I32(127)))
            codes[i] = np.uint8(below if negative else I32(I32(127) + cell))
        else:
            least = I32(x[i] > F32(0))
            codes[i] = np.uint8(cell if cell > least else least)


@helper
def _encode_4bit(x, scale, signed, codes):
    if signed:
        for i in range(x.size):
            # A negative value one ulp nearer to zero turns `beyond a midpoint` into `at or beyond`.
            bits = bits_of(x[i] / scale)
            negative = U32(bits >> U32(31))
            y = float_of(U32(U32(bits & ABS_MASK) - negative)) if bits != MINUS_ZERO else F32(0)
            cell = I32(I32(I32(y >= CUTS_4BIT[0]) + I32(y >= CUTS_4BIT[1])) + I32(y >= CUTS_4BIT[2]))
            cell = I32(I32(I32(cell + I32(y >= CUTS_4BIT[3])) + I32(y >= CUTS_4BIT[4])) + I32(y >= CUTS_4BIT[5]))
            cell = I32(cell + I32(y >= CUTS_4BIT[6]))
            codes[i] = np.uint8(I32(I32(7) - cell) if negative else I32(I32(I32(7) + cell) + I32(y >= CUTS_4BIT[7])))
    else:
        for i in range(x.size):
            cell = x[i] / scale * F32(16) - F32(0.5)
            cell = cell if cell > F32(0) else F32(0)
            codes[i] = np.uint8(I32(cell if cell < F32(15) else F32(15)))


@helper
def _encode_fp8(x, scale, signed, codes):
    for i in range(x.size):
        code = float_to_e4m3(x[i] / scale)
        least = U32(0) if signed else U32(x[i] > F32(0))
        codes[i] = np.uint8(code if code > least else least)


@helper
def block_amax_bits(x):
    """Largest magnitude as a float32 pattern, which orders like the value; NaN above Inf above all."""
    largest = U32(0)
    for i in range(x.size):
        magnitude = U32(bits_of(x[i]) & ABS_MASK)
        largest = magnitude if magnitude > largest else largest
    return largest


@helper
def scale_of(amax_bits, fmt):
    amax = float_of(amax_bits)
    amax = amax if amax > F32(SCALE_MIN) else F32(SCALE_MIN)
    return amax / F32(448) if fmt == FP8 else amax


@helper
def encode_block(x, scale, fmt, signed, codes):
    """Codes of one block of finite values, one a byte.

    x      [n] fp32, normalized by scale = scale_of(block_amax_bits(x), fmt).
    codes  [n] uint8, written.
    """
    if fmt == FP8:
        _encode_fp8(x, scale, signed, codes)
    elif fmt == FOUR:
        _encode_4bit(x, scale, signed, codes)
    else:
        nearest = _estimate_signed(x, scale, codes) if signed else _estimate_unsigned(x, scale, codes)
        if nearest < EPSILON:
            _exact_8bit(x, scale, signed, codes)


@helper
def decode_block(codes, scale, fmt, signed, x):
    """Values of one block: codes [n] uint8, one a byte -> x [n] fp32, written."""
    if fmt == FP8:
        for i in range(x.size):
            x[i] = e4m3_to_float(codes[i]) * scale
    elif fmt == FOUR and signed:
        for i in range(x.size):
            x[i] = SIGNED_4BIT[codes[i]] * scale
    elif fmt == FOUR:
        for i in range(x.size):
            x[i] = F32(I32(codes[i]) + I32(1)) * F32(0.0625) * scale
    elif signed:
        for i in range(x.size):
            x[i] = SIGNED_8BIT[codes[i]] * scale
    else:
        for i in range(x.size):
            x[i] = UNSIGNED_8BIT[codes[i]] * scale


@helper
def unpack(packed, codes):
    """[ceil(n/2)] bytes -> codes [n], one a byte; the even element comes from the high nibble."""
    for i in range(codes.size // 2):
        codes[2 * i] = packed[i] >> 4
        codes[2 * i + 1] = packed[i] & 15
    if codes.size % 2:
        codes[codes.size - 1] = packed[codes.size // 2] >> 4


@helper
def pack(codes, packed):
    """codes [n] -> [ceil(n/2)] bytes; an unused low nibble is 0."""
    for i in range(codes.size // 2):
        packed[i] = (codes[2 * i] << 4) | codes[2 * i + 1]
    if codes.size % 2:
        packed[codes.size // 2] = codes[codes.size - 1] << 4
