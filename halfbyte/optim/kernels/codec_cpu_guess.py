"""Codes of 64 values at once: guess from a few bits, then settle by one comparison. For the 8-bit and 4-bit maps.

A code's number is how many midpoints ("cuts") lie at or below y = value / scale. Of |y|'s fp32 pattern, exponent and
three bits of mantissa (a byte, `segment`) choose a stretch in which the midpoints lie almost evenly; the next eight
(`rest`) say where in the stretch:

    guess = base[segment] + (slope[segment] * rest >> 12)       never too high, at most one too low
    cell  = guess + (|y| >= cut[guess])

`guess_tables` finds base and slope by trial and asserts that promise for every pattern, so cells are the definition's
bit for bit, and no value needs a second look. base, slope and the four bytes of a cut are six look-ups of 64 bytes in
registers. Rejected: codec_cpu_portable's lines, 0.9 ns a value on a Sapphire Rapids core where this is 0.5 (of which
division alone takes 0.26); the same lines in registers twice as wide, 0.9; a gather from its exact table, 0.6.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types

from halfbyte.optim.formats import midpoints, zero_code
from halfbyte.optim.kernels.codec_cpu_avx512 import (
    BYTES,
    FLOATS,
    INTS,
    WORDS,
    call,
    constant,
    everywhere,
    load,
    looked_up,
    packed,
    packed_bytes,
    planes_of,
    quarters_of,
    signs,
    store,
    transposed,
    unpacked,
)
from halfbyte.optim.kernels.codec_cpu_cast import intrinsic

LOWEST = 96 << 11  # 2^-31 >> 12: below it lies no cut, and 256 segments later, no y


def guess_tables(cuts: np.ndarray) -> np.ndarray:
    """base and slope, [2, 256] uint8, for ascending cuts."""
    first = (np.arange(65536, dtype=np.uint32) + np.uint32(LOWEST)) << 12
    least = np.searchsorted(cuts[:-1], first.view(np.float32), side="right").reshape(256, 256)  # [segment, rest]
    most = np.searchsorted(cuts, (first | 0xFFF).view(np.float32), side="right").reshape(256, 256)
    base, slope, found = np.zeros(256, np.uint8), np.zeros(256, np.uint8), np.zeros(256, bool)
    average, rest = 16 * (most[:, -1] - least[:, 0]), np.arange(256)
    for trial in range(64):
        s = np.clip(average + (-1) ** trial * (trial // 2), 0, 255) if trial else np.zeros_like(average)
        for b in (least[:, 0], np.maximum(most[:, 0] - 1, 0)):
            guess = b[:, None] + (s[:, None] * rest >> 12)
            new = ~found & ((guess <= least) & (guess >= most - 1)).all(1)
            base[new], slope[new], found = b[new], s[new], found | new
        if found.all():
            break
    assert found.all(), f"no guess for segments {np.flatnonzero(~found)}"
    return np.stack([base, slope])


def _guess(builder: Any, magnitude: list, tables: np.ndarray) -> Any:
    """Bytes, from quarters of |y|'s pattern and the `guess_tables`."""
    shift, lowest = constant(INTS, 12), constant(INTS, LOWEST)
    words = packed(builder, [builder.sub(builder.ashr(x, shift), lowest) for x in magnitude])
    segment = packed_bytes(builder, [builder.lshr(x, constant(WORDS, 8)) for x in words])
    if not tables[1].any():  # a 4-bit map: no segment holds two cuts
        return looked_up(builder, tables[:1], segment)[0]
    base, slope = looked_up(builder, tables, segment)
    rest = [builder.and_(x, constant(WORDS, 255)) for x in words]
    rise = [builder.mul(a, b) for a, b in zip(unpacked(builder, slope, constant(BYTES, 0)), rest, strict=True)]
    return builder.add(base, packed_bytes(builder, [builder.lshr(x, constant(WORDS, 12)) for x in rise]))


@cache
def encoder(name: str, signed: bool) -> Any:
    """`encode_64(x, scale, codes)` of a map: void* x [64] fp32, finite; fp32; void* codes [64] uint8, written."""
    cuts = midpoints(name, signed).numpy()
    cuts = cuts[cuts > 0]
    tables, planes = guess_tables(cuts), planes_of(cuts)

    @intrinsic
    def encode_64(typing_context: Any, x: Any, scale: Any, codes: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, scale, target = args
            scale, zero = everywhere(builder, scale), constant(BYTES, 0)
            values = [load(builder, source, 64 * i, FLOATS) for i in range(4)]
            bits = [builder.bitcast(builder.fdiv(x, scale), INTS) for x in values]
            magnitude = bits
            if signed:  # a negative value one ulp nearer to 0: on a cut, it stays in the lower cell
                magnitude = [
                    builder.add(builder.and_(y, constant(INTS, 0x7FFFFFFF)), builder.ashr(y, constant(INTS, 31)))
                    for y in bits
                ]
            guess = _guess(builder, magnitude, tables)
            next_cut = quarters_of(builder, looked_up(builder, planes, guess))
            short = signs(builder, [builder.sub(a, b) for a, b in zip(magnitude, next_cut, strict=True)])
            one_more = builder.zext(builder.icmp_signed(">=", short, zero), BYTES)
            cell = builder.add(guess, one_more)
            if signed:
                middle = constant(BYTES, zero_code(name, signed))
                down = call(builder, "llvm.usub.sat.v64i8", BYTES, middle, cell)  # there is no -1
                is_negative = builder.icmp_signed("<", signs(builder, bits), zero)
                cell = builder.select(is_negative, down, builder.add(middle, cell))
            elif name == "8bit":  # rule 1
                positive = signs(builder, [builder.bitcast(x, INTS) for x in values])
                least = builder.zext(builder.icmp_signed(">", positive, zero), BYTES)
                cell = call(builder, "llvm.umax.v64i8", BYTES, cell, least)
            store(builder, transposed(builder, cell), target)
            return context.get_dummy_value()

        return types.void(types.voidptr, types.float32, types.voidptr), codegen

    return encode_64
