"""y = W x for one row of x (decoding text), straight from the 4-bit weight, which is read once.

The products are fp32 and there is no rounding before the last: more exact than a bf16 weight. A program takes a few
rows of W and all of K; a thread takes a block of sixteen codes of each row, so the sixteen values of x that it needs
serve all rows; it reads them as four integers of 64 bits, since sixteen small reads took most of the time. Arithmetic
limits it, about four instructions a weight; for more rows few_rows_triton.py lets the tensor cores do their part.

`multiple_of(..., 1)` hides from the compiler that loads could be wider: it would give a thread several blocks, and
exchange values between threads to get from one tensor's layout to the other's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e2m1_bits_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.words import as_blocks, four_at_a_time

# A decoded code is value * 2^-126. To save its product with 2^126, x is scaled up and the block scale does the rest:
# sums stay normal numbers for x from 1e-14 to 1e24.
X_OFFSET = tl.constexpr(2.0**48)
SCALE_OFFSET = tl.constexpr(2.0**78)
NUM_WARPS = 4
ROWS = 8
BLOCKS = 32 * NUM_WARPS


@triton.jit
def matvec_kernel(
    x_ptr,  # int64 [K/4], four values each
    blocks_ptr,
    scale_ptr,
    global_scale_ptr,
    bias_ptr,
    out_ptr,
    n,
    blocks_per_row,
    HAS_BIAS: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """One program: R values of y."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside_row = row < n
    row_start = row[:, None].to(tl.int64) * blocks_per_row
    acc = tl.zeros((R, B), tl.float32)
    for start in range(0, blocks_per_row, B):
        block = start + tl.multiple_of(tl.arange(0, B), 1)
        inside_block = block < blocks_per_row
        inside = inside_row[:, None] & inside_block[None, :]
        codes = tl.load(blocks_ptr + row_start + block[None, :], mask=inside, other=0)
        scale_byte = tl.load(scale_ptr + row_start + block[None, :], mask=inside, other=0)
        total = tl.zeros((R, B), tl.float32)
        for quarter in tl.static_range(4):
            four = tl.load(x_ptr + block * 4 + quarter, mask=inside_block, other=0)
            word = (codes >> (16 * quarter)).to(tl.int32)
            for i in tl.static_range(4):
                bits = (four >> (16 * i)).to(tl.int16)
                x = bits.to(out_ptr.dtype.element_ty, bitcast=True).to(tl.float32) * X_OFFSET
                total += e2m1_bits_to_float(word << (28 - 4 * i)) * x[None, :]
        acc += total * (e4m3_to_float(scale_byte.to(tl.int32)) * SCALE_OFFSET)
    y = tl.sum(acc, axis=1) * tl.load(global_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + row, mask=inside_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=inside_row)


def matvec_into(
    out: Tensor, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Fill out [1, N] with x [1, K] @ W^T + bias; x and out of one dtype, bf16 or fp16, contiguous."""
    n = out.shape[1]
    blocks = as_blocks(qdata)
    matvec_kernel[(triton.cdiv(n, ROWS),)](
        four_at_a_time(x),
        blocks,
        scale.contiguous(),
        global_scale,
        out if bias is None else bias,
        out,
        n,
        blocks.shape[1],
        HAS_BIAS=bias is not None,
        R=ROWS,
        B=BLOCKS,
        num_warps=NUM_WARPS,
    )
    return out


def matvec(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, K] @ W^T + bias in x's dtype; arguments as `matvec_into`'s."""
    out = torch.empty(1, qdata.shape[0], dtype=x.dtype, device=x.device)
    return matvec_into(out, x, qdata, scale, global_scale, bias)
