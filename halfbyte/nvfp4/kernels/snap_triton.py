"""Base plus a low-rank change, back on the base's grid, in one pass: 0.5625 bytes read and 0.5 written a value.

    qdata' = snap(base, fp32((scaling * up) @ down), offsets)        nvfp4/snap.py is the definition

The product is taken in fp64, as the definition asks, so that the order of its terms does not matter, by the tensor
cores where they have fp64. A thread holds words of eight codes; the words' parts come one after the other, each with
every eighth column of `down`, which is laid out so beforehand: nothing is exchanged between threads but the operands
of the product. A word lies in one block, so it has one scale and one offset.

Limits: arithmetic, about thirty instructions a value. Consumer GPUs run fp64 at 1/64 of their fp32 rate; there the
product takes most of the time. Rejected: a fixed order in fp32 without fused products (equal everywhere too, but twice
the instructions here and four times the time on a CPU), and exact integers from scaled factors (a column of `up` far
larger than its neighbours would swallow them).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.nvfp4.kernels.codec_triton import E2M1_OFFSET, FLOAT_MAX, e2m1_bits_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.dither_triton import OFFSET_BITS, keys, offset
from halfbyte.nvfp4.kernels.words import as_words

BELOW_HALF = tl.constexpr((1 << (OFFSET_BITS.value - 1)) - 1)  # a half, to be completed by a code's last bit
CODES_PER_WORD = tl.constexpr(8)
MAGNITUDE = tl.constexpr(7 << OFFSET_BITS.value)  # the place's integer part
LARGEST_PLACE = tl.constexpr(0x41700000)  # the bits of 8 + 7
NUM_WARPS = 2
ROWS = 32
WORDS = 32
RANK_STEP = 16


@triton.jit
def place_bits(v):
    """Place of |v| on the line of codes: the low 23 bits, in units of 2^-OFFSET_BITS; 6 and beyond at 7."""
    magnitude = tl.abs(v)
    low = tl.fma(magnitude, 2.0, 8.0).to(tl.int32, bitcast=True)
    middle = (magnitude + 10.0).to(tl.int32, bitcast=True)
    high = tl.fma(magnitude, 0.5, 12.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(low, middle), tl.minimum(high, LARGEST_PLACE))


@triton.jit
def moved_code(base, change, shift, DITHER: tl.constexpr):
    """New code, in the top four bits of an int32 (the rest means nothing).

    base    int32 with the old code in the top four bits.
    change  fp32, in units of the block's step.
    shift   the block's offset; without DITHER not read.
    """
    moved = tl.fma(e2m1_bits_to_float(base), E2M1_OFFSET, change)
    place = place_bits(moved)
    if DITHER:
        place += shift
    else:
        place += ((place >> OFFSET_BITS) & 1) + BELOW_HALF
    sign = tl.where((place & MAGNITUDE) == 0, base, moved.to(tl.int32, bitcast=True))
    return ((place << (28 - OFFSET_BITS)) & 0x7FFFFFFF) | (sign & -2147483648)


@triton.jit
def step_inv(scale_byte, global_scale):
    """1 / (scale * global_scale), finite; 0 where the scale is zero."""
    step = e4m3_to_float(scale_byte.to(tl.int32)) * global_scale
    inverse = tl.div_rn(1.0, tl.where(step > 0, step, 1.0))
    return tl.where(step > 0, tl.minimum(inverse, FLOAT_MAX), 0.0)


@triton.jit
def snap_kernel(
    words_ptr,
    scale_ptr,
    global_scale_ptr,
    down_ptr,  # fp64 [RANK, 8, K/8]
    up_ptr,  # fp64 [N, RANK]
    row_keys_ptr,  # int32 [N]
    block_keys_ptr,  # int32 [K/16]
    out_ptr,
    n,
    words_per_row,
    DITHER: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program: R rows of W words."""
    row = tl.program_id(1) * R + tl.arange(0, R)
    word = tl.program_id(0) * W + tl.arange(0, W)
    inside_row, inside_word = row < n, word < words_per_row
    inside = inside_row[:, None] & inside_word[None, :]
    place = row[:, None].to(tl.int64) * words_per_row + word[None, :]
    words = tl.load(words_ptr + place, mask=inside, other=0)
    inverse = step_inv(tl.load(scale_ptr + place // 2, mask=inside, other=0), tl.load(global_scale_ptr))
    shift = words
    if DITHER:
        row_key = tl.load(row_keys_ptr + row, mask=inside_row, other=0)[:, None]
        shift = offset(row_key, tl.load(block_keys_ptr + word // 2, mask=inside_word, other=0)[None, :])
    j = tl.arange(0, STEP)
    up_ptr += row[:, None].to(tl.int64) * RANK + j[None, :]
    down_ptr += j[:, None] * (CODES_PER_WORD * words_per_row) + word[None, :]
    new_words = tl.zeros((R, W), tl.uint32)
    for i in range(CODES_PER_WORD):  # not unrolled: the parts' sums would all be held at once
        part = CODES_PER_WORD - 1 - i
        change = tl.zeros((R, W), tl.float64)
        for first in tl.static_range(0, RANK, STEP):
            up = tl.load(up_ptr + first, mask=inside_row[:, None], other=0.0)
            down_place = (part + first * CODES_PER_WORD) * words_per_row
            down = tl.load(down_ptr + down_place, mask=inside_word[None, :], other=0.0)
            change = tl.dot(up, down, change, out_dtype=tl.float64)
        base = words << (28 - 4 * part)
        code = moved_code(base, change.to(tl.float32) * inverse, shift, DITHER)
        new_words = (new_words << 4) | (code.to(tl.uint32, bitcast=True) >> 28)
    tl.store(out_ptr + place, new_words.to(tl.int32, bitcast=True), mask=inside)


def by_part(down: Tensor, rank: int) -> Tensor:
    """[r, K] -> fp64 [rank, 8, K/8]: column 8w + c at [c, w]; zeros beyond r."""
    r, k = down.shape
    out = torch.zeros(rank, 8, k // 8, dtype=torch.float64, device=down.device)
    out[:r] = down.detach().view(r, k // 8, 8).transpose(1, 2)
    return out


def scaled(up: Tensor, scaling: float, rank: int) -> Tensor:
    """[N, r] -> fp64 [N, rank], times scaling; zeros beyond r."""
    n, r = up.shape
    out = torch.zeros(n, rank, dtype=torch.float64, device=up.device)
    out[:, :r] = up.detach()
    return out.mul_(scaling)


def snap_low_rank_into(
    out: Tensor,
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    dither_keys: tuple[int, int] | None,
) -> Tensor:
    """Fill out, uint8 [N, K/2], contiguous.

    qdata, scale, global_scale   the base: uint8 [N, K/2], uint8 [N, K/16], fp32 [].
    down [r, K], up [N, r]       the factors, any float dtype.
    dither_keys                  64-bit keys of rows and blocks (numerics/dither.py), or None to round to nearest.
    """
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    if n == 0:
        return out
    words_per_row = k // CODES_PER_WORD.value
    rank = triton.cdiv(max(1, down.shape[0]), RANK_STEP) * RANK_STEP
    row_keys = block_keys = out  # not read
    if dither_keys is not None:
        row_keys, block_keys = keys(*dither_keys, n, k // BLOCK_SIZE, out.device)
    grid = (triton.cdiv(words_per_row, WORDS), triton.cdiv(n, ROWS))
    snap_kernel[grid](
        as_words(qdata),
        scale.contiguous(),
        global_scale,
        by_part(down, rank),
        scaled(up, scaling, rank),
        row_keys,
        block_keys,
        out.view(torch.int32),
        n,
        words_per_row,
        DITHER=dither_keys is not None,
        R=ROWS,
        W=WORDS,
        RANK=rank,
        STEP=RANK_STEP,
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


def snap_low_rank(
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    down: Tensor,
    up: Tensor,
    scaling: float,
    dither_keys: tuple[int, int] | None,
) -> Tensor:
    """New codes, uint8 [N, K/2]; arguments as `snap_low_rank_into`'s."""
    out = torch.empty_like(qdata, memory_format=torch.contiguous_format)
    return snap_low_rank_into(out, qdata, scale, global_scale, down, up, scaling, dither_keys)
