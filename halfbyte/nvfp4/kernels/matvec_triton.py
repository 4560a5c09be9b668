"""y = x @ W^T for one to four rows of x (decoding), straight from the 4-bit weight, which is read once.

The products are fp32 and there is no rounding before the last: more exact than a bf16 weight. A program takes a few
rows of W and all of K; a thread takes a word of eight codes of each row, so the eight values of x that it needs serve
all rows. It is arithmetic that limits it, about five instructions a weight to decode and one a row of x; so from five
rows on, small_matmul_triton.py lets the tensor cores do the second part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e2m1_bits_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.words import as_words

CODES_PER_WORD = tl.constexpr(8)
# A decoded code is value * 2^-126. To save its product with 2^126, x is scaled up and the block scale does the rest:
# sums stay normal numbers for x from 1e-14 to 1e24.
X_OFFSET = tl.constexpr(2.0**48)
SCALE_OFFSET = tl.constexpr(2.0**78)
MAX_ROWS = 4
NUM_WARPS = 4
ROWS_N = 8
WORDS = 32 * NUM_WARPS


@triton.jit
def matvec_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    global_scale_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    words_per_row,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    """One program: R columns of y."""
    row_m = tl.arange(0, M)
    row = tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.max_contiguous(tl.arange(0, W), 1)  # one word a thread, not four: see snap_triton.py
    inside_m, inside_row = row_m < m, row < n
    row_start = row[:, None].to(tl.int64) * words_per_row
    acc = tl.zeros((M, R, W), tl.float32)
    for start in range(0, words_per_row, W):
        word = start + lane
        inside_word = word < words_per_row
        inside = inside_row[:, None] & inside_word[None, :]
        words = tl.load(words_ptr + row_start + word[None, :], mask=inside, other=0)
        scale_byte = tl.load(scale_ptr + (row_start + word[None, :]) // 2, mask=inside, other=0)
        part = tl.zeros((M, R, W), tl.float32)
        x_place = row_m[:, None] * (words_per_row * CODES_PER_WORD) + word[None, :] * CODES_PER_WORD
        inside_x = inside_m[:, None] & inside_word[None, :]
        for i in tl.static_range(8):
            x = tl.load(x_ptr + x_place + i, mask=inside_x, other=0.0).to(tl.float32) * X_OFFSET
            part += e2m1_bits_to_float(words << (28 - 4 * i))[None, :, :] * x[:, None, :]
        acc += part * (e4m3_to_float(scale_byte.to(tl.int32)) * SCALE_OFFSET)[None, :, :]
    y = tl.sum(acc, axis=2) * tl.load(global_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=inside_row, other=0.0).to(tl.float32)[None, :]
    place = row_m[:, None] * n + row[None, :]
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside_m[:, None] & inside_row[None, :])


def matvec_into(
    out: Tensor, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Fill out [M, N] with x [M, K] @ W^T + bias, 1 <= M <= 4; x and out bf16, fp16 or fp32, contiguous."""
    m, n = out.shape
    assert m <= MAX_ROWS
    words = as_words(qdata)
    matvec_kernel[(triton.cdiv(n, ROWS_N),)](
        x.contiguous(),
        words,
        scale.contiguous(),
        global_scale,
        out if bias is None else bias,
        out,
        m,
        n,
        words.shape[1],
        HAS_BIAS=bias is not None,
        M=triton.next_power_of_2(m),
        R=ROWS_N,
        W=WORDS,
        num_warps=NUM_WARPS,
    )
    return out


def matvec(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ W^T + bias in x's dtype; arguments as `matvec_into`'s."""
    out = torch.empty(x.shape[0], qdata.shape[0], dtype=x.dtype, device=x.device)
    return matvec_into(out, x, qdata, scale, global_scale, bias)
