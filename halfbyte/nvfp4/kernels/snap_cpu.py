"""Base plus a low-rank change, back on the base's grid, on a CPU: one pass, compiled by numba.

`snap_rows` in halfbyte/lora/snap_adapter.py is the definition, and the codes are the same bits: no fused products, the
terms of the fp64 product added in order. Needs the extra `halfbyte[cpu]`; importing this file fails without it. About
3 ns a value on one core of an EPYC 9004 for rank 16, where torch's operators take 10.

A tile is a piece of one row, so that its buffers stay in the first-level cache, and each loop does one thing over plain
arrays, which is what the compiler turns into vector instructions. The kernel releases the GIL: plain threads share the
rows. The first call on a machine compiles for some seconds; numba keeps the result beside this file, or in the user's
cache folder.
"""

import threading
from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor

from halfbyte.numerics.dither import OFFSET_BITS, low_word
from halfbyte.numerics.hashing import indexed_keys

TILE = 256
UNROLL = 4  # terms of the product added per pass over a tile
ROWS_PER_THREAD = 64  # at least; below, starting a thread costs more than it saves

f32, i32, u32, u8 = np.float32, np.int32, np.uint32, np.uint8
M1, M2 = u32(0x7FEB352D), u32(0x846CA68B)  # numerics/dither.py
SHIFT, ONE = u32(32 - OFFSET_BITS), i32(1 << OFFSET_BITS)
HALF = i32(ONE // 2 - 1)


@numba.njit(nogil=True, cache=True)
def unpack(packed, codes):
    """Bytes to codes, two a byte."""
    for c in range(len(packed)):
        codes[2 * c] = packed[c] & u8(15)
        codes[2 * c + 1] = packed[c] >> u8(4)


@numba.njit(nogil=True, cache=True)
def pack(codes, packed):
    """Codes to bytes."""
    for c in range(len(packed)):
        packed[c] = codes[2 * c] | (codes[2 * c + 1] << u8(4))


@numba.njit(nogil=True, cache=True)
def spread(per_block, per_value):
    """A value for each block of 16 to one for each column."""
    for block in range(len(per_block)):
        value = per_block[block]
        for c in range(16):
            per_value[16 * block + c] = value


@numba.njit(nogil=True, cache=True)
def product(up_n, down, begin, acc):
    """acc[c] = sum over j of up_n[j] * down[j, begin + c], terms added in order; r a multiple of UNROLL."""
    acc[:] = 0.0
    for j in range(0, up_n.shape[0], UNROLL):
        b0, b1, b2, b3 = up_n[j], up_n[j + 1], up_n[j + 2], up_n[j + 3]
        row0, row1 = down[j, begin : begin + len(acc)], down[j + 1, begin : begin + len(acc)]
        row2, row3 = down[j + 2, begin : begin + len(acc)], down[j + 3, begin : begin + len(acc)]
        for c in range(len(acc)):
            acc[c] = (((acc[c] + b0 * row0[c]) + b1 * row1[c]) + b2 * row2[c]) + b3 * row3[c]


@numba.njit(nogil=True, cache=True)
def move(codes, acc, inverse, place):
    """Signed place on the line of codes of value(code) + change * inverse, in units of 2^-OFFSET_BITS (../snap.py).

    A zero keeps the base's sign in the base's code, so that of a place of zero is not needed.
    """
    for c in range(codes.shape[0]):
        code = i32(codes[c])
        index = code & i32(7)
        halves = max(index, max(i32(2) * index - i32(4), i32(4) * index - i32(16)))
        value = f32(i32(halves)) * f32(0.5)
        value = -value if code & i32(8) else value
        moved = value + f32(acc[c]) * inverse[c]
        size = abs(moved)
        low, middle, high = size * f32(2) + f32(8), size + f32(10), size * f32(0.5) + f32(12)
        line = low if low < middle else middle
        line = line if line < high else high
        line = line if line < f32(15) else f32(15)
        found = i32((line - f32(8)) * f32(ONE))
        place[c] = -found if moved < f32(0) else found


@numba.njit(nogil=True, cache=True)
def offsets(row_key, block_keys, offset):
    """numerics/dither.py, for a piece of one row; a value for each column."""
    for block in range(len(block_keys)):
        x = row_key ^ block_keys[block]
        x = u32(x ^ (x >> u32(16)))
        x = u32(x * M1)
        x = u32(x ^ (x >> u32(15)))
        x = u32(x * M2)
        x = u32(x ^ (x >> u32(16)))
        shift = i32(u32(x >> SHIFT))
        for c in range(16):
            offset[16 * block + c] = shift


@numba.njit(nogil=True, cache=True)
def to_even(place, offset):
    """The offsets that round to nearest, ties to the even code."""
    for c in range(offset.shape[0]):
        offset[c] = HALF + ((abs(place[c]) >> i32(OFFSET_BITS)) & i32(1))


@numba.njit(nogil=True, cache=True)
def settle(place, offset, codes):
    """Replace base codes by the new ones; a zero keeps the base's sign."""
    for c in range(codes.shape[0]):
        magnitude = (abs(place[c]) + offset[c]) >> i32(OFFSET_BITS)
        sign = i32(8) if place[c] < i32(0) else i32(0)
        sign = i32(codes[c]) & i32(8) if magnitude == i32(0) else sign
        codes[c] = u8(magnitude | sign)


@numba.njit(nogil=True, cache=True)
def snap_rows(qdata, step_inv, up, down, row_keys, block_keys, dithered, out, start, stop):
    """Rows start to stop of qdata [N, K/2] into out; up fp64 [N, r], scaled, down fp64 [r, K], keys uint32."""
    k = down.shape[1]
    acc_tile, codes_tile = np.empty(TILE, np.float64), np.empty(TILE, np.uint8)
    inverse_tile, place_tile, offset_tile = np.empty(TILE, f32), np.empty(TILE, i32), np.empty(TILE, i32)
    for begin in range(0, k, TILE):
        width = min(TILE, k - begin)
        acc, codes, inverse = acc_tile[:width], codes_tile[:width], inverse_tile[:width]
        place, offset = place_tile[:width], offset_tile[:width]
        for n in range(start, stop):
            unpack(qdata[n, begin // 2 : (begin + width) // 2], codes)
            spread(step_inv[n, begin // 16 : (begin + width) // 16], inverse)
            product(up[n], down, begin, acc)
            move(codes, acc, inverse, place)
            if dithered:
                offsets(row_keys[n], block_keys[begin // 16 : (begin + width) // 16], offset)
            else:
                to_even(place, offset)
            settle(place, offset, codes)
            pack(codes, out[n, begin // 2 : (begin + width) // 2])


def snap_low_rank(
    qdata: Tensor, step_inv: Tensor, down: Tensor, up: Tensor, scaling: float, keys: tuple[int, int] | None
) -> Tensor:
    """New codes, uint8 [N, K/2].

    qdata, step_inv   the base's codes, uint8 [N, K/2], and 1/(scale * global_scale), fp32 [N, K/16].
    down, up          the factors [r, K] and [N, r], any float dtype.
    keys              64-bit keys of rows and blocks (numerics/dither.py), or None to round to nearest.
    """
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    out = torch.empty(n, k // 2, dtype=torch.uint8)
    row_keys, block_keys = (
        low_word(indexed_keys(key, 0, count)).numpy().view(np.uint32)
        for key, count in zip(keys or (0, 0), (n, k // 16), strict=True)
    )
    arguments = (
        # A copy: numpy() pins a tensor's storage for good, and FSDP2 frees and refills the storage of what it gathers.
        qdata.detach().clone(memory_format=torch.contiguous_format).numpy(),
        step_inv.numpy(),
        padded(up.T).mul_(scaling).T.contiguous().numpy(),
        padded(down).numpy(),
        row_keys,
        block_keys,
        keys is not None,
        out.numpy(),
    )
    workers = max(1, min(torch.get_num_threads(), n // ROWS_PER_THREAD))
    bounds = [n * worker // workers for worker in range(workers + 1)]
    threads = [threading.Thread(target=snap_rows, args=(*arguments, *piece)) for piece in pairwise(bounds[1:])]
    for thread in threads:
        thread.start()
    snap_rows(*arguments, 0, bounds[1])  # type: ignore[call-arg]
    for thread in threads:
        thread.join()
    return out


def padded(factor: Tensor) -> Tensor:
    """[r, K] as fp64 with rows of zeros up to a multiple of UNROLL: a term of zero changes no sum."""
    r, k = factor.shape
    result = torch.zeros(-(-r // UNROLL) * UNROLL, k, dtype=torch.float64)
    result[:r] = factor.detach()
    return result
