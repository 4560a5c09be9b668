"""The 8-bit and 4-bit maps in plain loops, which LLVM vectorizes for any CPU: encode and decode a tile.

4-bit   a count of comparisons with the eight positive midpoints (signed), one subtraction (unsigned: k/16).
8-bit   the dynamic map is a grid of equal cells in each decade, ten times finer and half as many cells one decade
        down. So "cell number against value" is a concave broken line, the minimum of seven straight lines: no search,
        no table, no decade to find. Where two decades meet, the boundary lies a fifth of a cell into the upper one. A
        tile in which any value comes within EPSILON cells of a boundary (one in twenty) is done again exactly, by a
        table on the upper 16 bits, so codes equal the definition's bit for bit. Rejected: the table for every tile,
        0.72 ns a value on a Zen 4 core where this is 0.5; looking up the close values one by one, 0.83.

Where the CPU has AVX-512 VBMI, codec_cpu_vector does the same in half the time, and takes from here the exact form,
for what is left of a block when it is cut into groups of 64. Loops over blocks are inside the functions: called once a
block, the set-up of each vector loop (some 25 constants) costs as much as a hundred values.
"""

from typing import Any

import numpy as np
from numba import njit

from halfbyte.optim.formats import codebook, midpoints
from halfbyte.optim.kernels.codec_cpu_cast import ABS_MASK, F32, HELPER, U32, bits_of, float_of, helper

I32 = np.int32
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

EPSILON = F32(7e-5)  # cells: see _lines
STEP_IN = F32(0.2)  # cells: how far a decade's first boundary lies in it
estimate: Any = njit(**HELPER, fastmath={"contract"})  # may round as it comes


def _lines(cells_in_first: int) -> tuple[tuple, tuple]:
    """(slopes, offsets) of the seven decades: cell number = slope * |y| + offset, cells counted from zero's own.

    The offset of the last is 2e-5 high, so that y = 1 comes out beyond its last cell however it was rounded. With that
    and the rounding of slopes and sums, up to 255 cells, a position is wrong by at most 6e-5.
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


@estimate
def _estimate_signed(x, scales, block_size, codes):
    """Codes, and the least distance (in cells) of a value to a boundary; kept as bits, whose minimum vectorizes."""
    nearest = bits_of(F32(1))
    for block in range(scales.size):
        scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
        values, out = x[lo:hi], codes[lo:hi]
        for i in range(values.size):
            y = values[i] / scale
            t = _position(abs(y), SIGNED_SLOPES, SIGNED_OFFSETS)
            cell = I32(t)
            share = t - F32(cell)
            above = share - (STEP_IN if I32(cell & I32(cell - I32(1))) == 0 else F32(0))
            cell = I32(cell - I32(above < F32(0)))
            above, below = abs(above), F32(1) - share
            distance = bits_of(above if above < below else below)
            nearest = distance if distance < nearest else nearest
            cell = I32(cell if y > F32(0) else I32(-cell))
            out[i] = np.uint8(I32(I32(cell + I32(127)) + I32(y >= SIGNED_TOP)))
    return float_of(nearest)


@estimate
def _estimate_unsigned(x, scales, block_size, codes):
    nearest = bits_of(F32(1))
    for block in range(scales.size):
        scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
        values, out = x[lo:hi], codes[lo:hi]
        for i in range(values.size):
            y = values[i] / scale
            t = _position(y, UNSIGNED_SLOPES, UNSIGNED_OFFSETS)
            cell = I32(t)
            share = t - F32(cell)
            above = share - (STEP_IN if I32(cell & I32(cell + I32(1))) == 0 else F32(0))
            cell = I32(cell - I32(above < F32(0)))
            above, below = abs(above), F32(1) - share
            distance = bits_of(above if above < below else below)
            nearest = distance if distance < nearest else nearest
            least = I32(values[i] > F32(0))
            cell = cell if cell > least else least
            out[i] = np.uint8(I32(cell + I32(y >= UNSIGNED_TOP)))
    return float_of(nearest)


@helper
def _cell_of(y, prefixes):
    """The cell of |y| by table; a negative value on a midpoint stays in the one nearer to zero."""
    bits = bits_of(y)
    magnitude = U32(bits & ABS_MASK)
    prefix = U32(magnitude >> U32(16))
    entry = prefixes[U32((prefix if prefix > ABOVE_MIN else ABOVE_MIN) - ABOVE_MIN)]
    cut = U32(U32(entry & U32(0x1FFFF)) + U32(bits >> U32(31)))
    return I32(I32(entry >> U32(17)) + I32(U32(magnitude & U32(0xFFFF)) >= cut))


@helper
def _exact_8bit(values, scale, signed, out):
    """Codes of one block by table, as state_ops does it."""
    if signed:
        for i in range(values.size):
            y = values[i] / scale
            cell = _cell_of(y, SIGNED_PREFIXES)
            lower = cell if cell < I32(127) else I32(127)  # there is no -1
            out[i] = np.uint8(I32(I32(127) - lower) if y < F32(0) else I32(I32(127) + cell))
    else:
        for i in range(values.size):
            cell = _cell_of(values[i] / scale, UNSIGNED_PREFIXES)
            least = I32(values[i] > F32(0))
            out[i] = np.uint8(cell if cell > least else least)


@helper
def _exact_4bit(values, scale, signed, out):
    """Codes of one block by comparisons."""
    if signed:
        for i in range(values.size):
            # A negative value one ulp nearer to zero turns `beyond a midpoint` into `at or beyond`.
            bits = bits_of(values[i] / scale)
            negative = U32(bits >> U32(31))
            y = float_of(U32(U32(bits & ABS_MASK) - negative)) if bits != MINUS_ZERO else F32(0)
            cell = I32(I32(I32(y >= CUTS_4BIT[0]) + I32(y >= CUTS_4BIT[1])) + I32(y >= CUTS_4BIT[2]))
            cell = I32(I32(I32(cell + I32(y >= CUTS_4BIT[3])) + I32(y >= CUTS_4BIT[4])) + I32(y >= CUTS_4BIT[5]))
            cell = I32(cell + I32(y >= CUTS_4BIT[6]))
            out[i] = np.uint8(I32(I32(7) - cell) if negative else I32(I32(I32(7) + cell) + I32(y >= CUTS_4BIT[7])))
    else:
        for i in range(values.size):
            position = values[i] / scale * F32(16) - F32(0.5)
            position = position if position > F32(0) else F32(0)
            out[i] = np.uint8(I32(position if position < F32(15) else F32(15)))


@helper
def exact(values, scale, is_8bit, signed, out):
    """Codes of one block."""
    if is_8bit:
        _exact_8bit(values, scale, signed, out)
    else:
        _exact_4bit(values, scale, signed, out)


def encoder(name: str, signed: bool) -> Any:
    """`encode(x, scales, block_size, codes)` of a map."""
    is_8bit = name == "8bit"
    estimate_codes = _estimate_signed if signed else _estimate_unsigned

    @helper
    def encode(x, scales, block_size, codes):
        if is_8bit and estimate_codes(x, scales, block_size, codes) >= EPSILON:
            return
        for block in range(scales.size):
            lo, hi = block * block_size, min(x.size, (block + 1) * block_size)
            exact(x[lo:hi], scales[block], is_8bit, signed, codes[lo:hi])

    return encode


def decoder(name: str, signed: bool) -> Any:
    """`decode(codes, scales, block_size, x)` of a map."""
    table = codebook(name, signed).numpy()

    @helper
    def decode(codes, scales, block_size, x):
        for block in range(scales.size):
            scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
            source, values = codes[lo:hi], x[lo:hi]
            for i in range(values.size):
                values[i] = table[source[i]] * scale

    return decode
