"""Base plus a low-rank change, back on the base's grid, in one pass: 0.5625 bytes read and 0.5 written a value.

    qdata' = snap(base, fp32(scaling * (up @ down)), threshold)      nvfp4/snap.py is the definition

The product is taken in fp64, as the definition asks, so that the order of its terms does not matter. A thread holds the
eight columns of a word for a few rows. The eighth-part of a word comes first in every shape ([8, R, W]): `down` and the
columns' keys are laid out so beforehand, neighbouring threads then read neighbouring values, and nothing is exchanged
between threads. `multiple_of(..., 1)` hides from the compiler that loads could be wider (four words a thread).

Limits: on an H200 288 us for 14336 x 4096 at r = 16, far from the memory's floor: 160 registers leave 12 warps a
multiprocessor, too few to hide the product's reads. Consumer GPUs run fp64 at 1/64 of their fp32 rate; there the
product takes most of the time. A product by fp64 tensor cores is written down in docs/log.md. Rejected: a fixed order
in fp32 without fused products (equal everywhere too, but twice the instructions here and four times the time on a CPU),
and exact integers from scaled factors (a column of `up` far larger than its neighbours would swallow them).
"""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import E2M1_MAX, FLOAT_MAX, e2m1_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.dither_triton import keys, threshold
from halfbyte.nvfp4.kernels.words import as_words

CODES_PER_WORD = tl.constexpr(8)
INTEGERS_FROM = tl.constexpr(2.0**23)
SIGNED_INTEGERS_FROM = tl.constexpr(1.5 * 2.0**23)
NUM_WARPS = 4
ROWS = 4
WORDS = 32 * NUM_WARPS


@triton.jit
def signed_position(v):
    """Place on the line of codes, -7 to 7."""
    magnitude = tl.minimum(tl.abs(v), E2M1_MAX)
    place = tl.minimum(tl.minimum(magnitude * 2, magnitude + 2), tl.fma(magnitude, 0.5, 4.0))
    sign = v.to(tl.int32, bitcast=True) & -2147483648
    return (place.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_place(place, row_key, column_key, DITHER: tl.constexpr):
    """The integer that a place becomes."""
    if DITHER:
        lower = tl.floor(place)
        return lower + tl.where(place - lower > threshold(row_key, column_key), 1.0, 0.0)
    else:
        return (place + SIGNED_INTEGERS_FROM) - SIGNED_INTEGERS_FROM


@triton.jit
def code_of(rounded, base):
    """int32 code of an integer place; a zero keeps the base's sign, its top bit."""
    magnitude = (tl.abs(rounded) + INTEGERS_FROM).to(tl.int32, bitcast=True) & 7
    sign = (tl.where(magnitude == 0, base, rounded.to(tl.int32, bitcast=True)) >> 28) & 8
    return magnitude | sign


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
    down_ptr,  # fp64 [r, 8, K/8]
    up_ptr,  # [N, r]
    row_keys_ptr,  # int32 [N]
    column_keys_ptr,  # int32 [8, K/8]
    out_ptr,
    scaling_high,
    scaling_middle,
    scaling_low,
    n,
    words_per_row,
    r,
    DITHER: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """One program: R rows of W words."""
    row = tl.program_id(1) * R + tl.arange(0, R)
    word = tl.multiple_of(tl.program_id(0) * W + tl.arange(0, W), 1)
    inside_row, inside_word = row < n, word < words_per_row
    part = tl.arange(0, CODES_PER_WORD)[:, None, None]
    down_place = part * words_per_row + word[None, None, :]  # [8, 1, W]
    inside_down = inside_word[None, None, :]

    delta = tl.zeros((CODES_PER_WORD, R, W), tl.float64)
    for j in range(r):
        down = tl.load(down_ptr + down_place, mask=inside_down, other=0.0)
        up = tl.load(up_ptr + row.to(tl.int64) * r + j, mask=inside_row, other=0.0).to(tl.float64)
        delta = tl.fma(up[None, :, None], down, delta)
        down_ptr += CODES_PER_WORD * words_per_row
    scaling = tl.full([], 0.0, tl.float64) + scaling_high + scaling_middle + scaling_low
    change = (delta * scaling).to(tl.float32)

    place = row[:, None].to(tl.int64) * words_per_row + word[None, :]  # [R, W]
    inside = inside_row[:, None] & inside_word[None, :]
    words = tl.load(words_ptr + place, mask=inside, other=0)
    scale_byte = tl.load(scale_ptr + place // 2, mask=inside, other=0)
    base = words[None, :, :] << (28 - 4 * part)  # each part's code in the top four bits
    inverse = step_inv(scale_byte, tl.load(global_scale_ptr))[None, :, :]
    moved = signed_position(e2m1_to_float(base) + change * inverse)
    if DITHER:
        row_key = tl.load(row_keys_ptr + row, mask=inside_row, other=0)[None, :, None]
        column_key = tl.load(column_keys_ptr + down_place, mask=inside_down, other=0)
        rounded = round_place(moved, row_key, column_key, True)
    else:
        rounded = round_place(moved, 0, 0, False)
    new_words = tl.sum(code_of(rounded, base) << (4 * part), axis=0)
    tl.store(out_ptr + place, new_words, mask=inside)


def three_floats(value: float) -> tuple[float, float, float]:
    """Three fp32 numbers whose sum is the fp64 value: a kernel's float argument arrives as fp32."""
    high = ctypes.c_float(value).value
    middle = ctypes.c_float(value - high).value
    return high, middle, value - high - middle


def by_part(down: Tensor) -> Tensor:
    """[r, K] -> fp64 [r, 8, K/8]: column 8w + c at [c, w]."""
    r, k = down.shape
    return down.detach().view(r, k // 8, 8).transpose(1, 2).to(torch.float64, memory_format=torch.contiguous_format)


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
    dither_keys                  64-bit keys of rows and columns (numerics/dither.py), or None to round to nearest.
    """
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    if n == 0:
        return out
    words_per_row = k // CODES_PER_WORD.value
    row_keys = column_keys = out  # not read
    if dither_keys is not None:
        row_keys, column_keys = keys(*dither_keys, n, k, out.device, stride=CODES_PER_WORD.value)
    grid = (triton.cdiv(words_per_row, WORDS), triton.cdiv(n, ROWS))
    snap_kernel[grid](
        as_words(qdata),
        scale.contiguous(),
        global_scale,
        by_part(down),
        up.detach().contiguous(),
        row_keys,
        column_keys,
        out.view(torch.int32),
        *three_floats(scaling),
        n,
        words_per_row,
        down.shape[0],
        DITHER=dither_keys is not None,
        R=ROWS,
        W=WORDS,
        num_warps=NUM_WARPS,
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
