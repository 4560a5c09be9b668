"""y = x @ W^T for one to four rows of x (decoding), straight from the 4-bit weight, which is read once.

The products are fp32 and there is no rounding before the last: more exact than a bf16 weight. A program takes a few
rows of W and all of K; a thread takes a block of sixteen codes of each row, so the sixteen values of x that it needs
serve all rows. It is arithmetic that limits it, about four instructions a weight to decode and one a row of x; so from
five rows on, small_matmul_triton.py lets the tensor cores do the second part.

`multiple_of(..., 1)` hides from the compiler that loads could be wider: it would give a thread several blocks, and
exchange values between threads to get from one tensor's layout to the other's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e2m1_bits_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.words import as_blocks

BLOCK_SIZE = tl.constexpr(16)
# A decoded code is value * 2^-126. To save its product with 2^126, x is scaled up and the block scale does the rest:
# sums stay normal numbers for x from 1e-14 to 1e24.
X_OFFSET = tl.constexpr(2.0**48)
SCALE_OFFSET = tl.constexpr(2.0**78)
MAX_ROWS = 4
NUM_WARPS = 4
ROWS_N = 8
BLOCKS = 32 * NUM_WARPS


@triton.jit
def matvec_kernel(
    x_ptr,
    blocks_ptr,
    scale_ptr,
    global_scale_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    blocks_per_row,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """One program: R columns of y."""
    row_m = tl.arange(0, M)
    row = tl.program_id(0) * R + tl.arange(0, R)
    lane = tl.multiple_of(tl.arange(0, B), 1)
    inside_m, inside_row = row_m < m, row < n
    row_start = row[:, None].to(tl.int64) * blocks_per_row
    acc = tl.zeros((M, R, B), tl.float32)
    for start in range(0, blocks_per_row, B):
        block = start + lane
        inside_block = block < blocks_per_row
        inside = inside_row[:, None] & inside_block[None, :]
        codes = tl.load(blocks_ptr + row_start + block[None, :], mask=inside, other=0)
        scale_byte = tl.load(scale_ptr + row_start + block[None, :], mask=inside, other=0)
        part = tl.zeros((M, R, B), tl.float32)
        x_place = (row_m[:, None] * blocks_per_row + block[None, :]) * BLOCK_SIZE
        inside_x = inside_m[:, None] & inside_block[None, :]
        for half in tl.static_range(2):
            word = (codes >> (32 * half)).to(tl.int32)
            for i in tl.static_range(8):
                x = tl.load(x_ptr + x_place + 8 * half + i, mask=inside_x, other=0.0).to(tl.float32) * X_OFFSET
                part += e2m1_bits_to_float(word << (28 - 4 * i))[None, :, :] * x[:, None, :]
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
    blocks = as_blocks(qdata)
    matvec_kernel[(triton.cdiv(n, ROWS_N),)](
        x.contiguous(),
        blocks,
        scale.contiguous(),
        global_scale,
        out if bias is None else bias,
        out,
        m,
        n,
        blocks.shape[1],
        HAS_BIAS=bias is not None,
        M=triton.next_power_of_2(m),
        R=ROWS_N,
        B=BLOCKS,
        num_warps=NUM_WARPS,
    )
    return out


def matvec(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ W^T + bias in x's dtype; arguments as `matvec_into`'s."""
    out = torch.empty(x.shape[0], qdata.shape[0], dtype=x.dtype, device=x.device)
    return matvec_into(out, x, qdata, scale, global_scale, bias)
