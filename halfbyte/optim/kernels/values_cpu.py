"""Parameters and gradients of a tile: widened to fp32, and stored back, rounded to nearest or at random."""

import numpy as np

from halfbyte.optim.kernels.codec_cpu_cast import (
    INF_BITS,
    U32,
    bf16_to_float,
    bits_of,
    float_to_bf16,
    float_to_half,
    half_to_float,
    helper,
)
from halfbyte.optim.kernels.memory_cpu import halves
from halfbyte.optim.kernels.table_cpu import BFLOAT16, FLOAT32, INNER, NUMEL, OFFSET, OUTER

MIX1, MIX2 = U32(0x85EBCA6B), U32(0xC2B2AE35)


@helper
def fmix32(x):
    x = U32(x ^ U32(x >> U32(16)))
    x = U32(x * MIX1)
    x = U32(x ^ U32(x >> U32(13)))
    x = U32(x * MIX2)
    return U32(x ^ U32(x >> U32(16)))


@helper
def widened(address, start, kind, scratch):
    """The address of `scratch.size` values as fp32: where they are, or that of a widened copy in scratch."""
    if kind == FLOAT32:
        return address + 4 * start
    narrow = halves(address + 2 * start, scratch.size)
    if kind == BFLOAT16:
        for i in range(scratch.size):
            scratch[i] = bf16_to_float(narrow[i])
    else:
        for i in range(scratch.size):
            scratch[i] = half_to_float(narrow[i])
    return np.int64(scratch.ctypes.data)


@helper
def store_nearest(x, narrow, kind):
    if kind == BFLOAT16:
        for i in range(x.size):
            narrow[i] = float_to_bf16(x[i])
    else:
        for i in range(x.size):
            narrow[i] = float_to_half(x[i])


@helper
def _rounded_up_or_down(x, index, key, multiply):
    """bf16 pattern of x, rounded by the random bits of a global index; see halfbyte.optim.rounding."""
    low = U32(U32(index) * multiply)
    high = U32(U32(index >> 32) * MIX1)
    random = U32(fmix32(U32(U32(low + key) + high)) & U32(0xFFFF))
    bits = bits_of(x)
    finite = U32(bits & U32(0x7F800000)) != INF_BITS
    return np.uint16(U32(bits + random) >> U32(16)) if finite else float_to_bf16(x)


@helper
def store_stochastic(x, narrow, row, start, key, multiply):
    """Into bf16; row gives the global index of local element `start`."""
    n = x.size
    if row[INNER] >= row[NUMEL]:
        for i in range(n):
            narrow[i] = _rounded_up_or_down(x[i], row[OFFSET] + start + i, key, multiply)
        return
    run, place = start // row[INNER], start % row[INNER]
    for i in range(n):
        index = row[OFFSET] + run * row[OUTER] + place
        narrow[i] = _rounded_up_or_down(x[i], index, key, multiply)
        place += 1
        if place == row[INNER]:
            run, place = run + 1, 0
