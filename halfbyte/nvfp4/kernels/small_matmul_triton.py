"""y = x @ W^T for 9 to 64 rows of x, straight from the 4-bit weight, which is read once.

Code times block scale has at most 6 significant bits, so it is exact in bf16 and fp16, and tensor cores multiply it;
the global scale comes after. W is the left operand (N is its M), for x has too few rows to fill one. Block j of a row
holds columns 16j to 16j + 15: its codes go to sixteen products over j, each with every sixteenth column of x, so
nothing is interleaved (as one product over all columns the compiler decodes each scale once a value). x is laid out for
that beforehand; read in place, it took most of the time. K is cut into pieces to give every multiprocessor work, and
the pieces' sums are added in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e2m1_bits_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.words import as_blocks

BLOCK_SIZE = tl.constexpr(16)
# The decoded code is value * 2^-126; the scale brings 2^118 of that back (448 * 2^118 is finite), the end 2^8.
SCALE_OFFSET = tl.constexpr(2.0**118)
REST = 2.0**8
MAX_ROWS = 64
NUM_WARPS = 4
BLOCK_N = 64
BLOCKS = 16  # of sixteen columns, a step
NUM_STAGES = 2
PROGRAMS_PER_MULTIPROCESSOR = 8
PART_BLOCKS = 4


@triton.jit
def part_kernel(x_ptr, out_ptr, m, blocks_per_row, BM: tl.constexpr, BB: tl.constexpr):
    """out[p, j, m] = x[m, 16 j + p], zero from row m on; out is [16, K/16, BM]. One program: BB blocks of columns."""
    block = tl.program_id(0) * BB + tl.arange(0, BB)[:, None, None]
    part = tl.arange(0, BLOCK_SIZE)[None, :, None]
    row_m = tl.arange(0, BM)[None, None, :]
    inside = block < blocks_per_row
    x = tl.load(x_ptr + (row_m * blocks_per_row + block) * BLOCK_SIZE + part, mask=inside & (row_m < m), other=0.0)
    tl.store(out_ptr + (part * blocks_per_row + block) * BM + row_m, x, mask=inside)


@triton.jit
def small_matmul_kernel(
    x_ptr,  # [16, K/16, BM], see part_kernel
    blocks_ptr,
    scale_ptr,
    partial_ptr,  # fp32 [pieces, M, N]
    m,
    n,
    blocks_per_row,
    blocks_per_piece,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """One program: all rows of x, BN columns of y, one piece of K."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    row_m = tl.arange(0, BM)
    inside_row, inside_m = row < n, row_m < m
    first = tl.program_id(1) * blocks_per_piece
    last = tl.minimum(first + blocks_per_piece, blocks_per_row)
    row_start = row[:, None].to(tl.int64) * blocks_per_row
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(first, last, BB):
        block = start + tl.arange(0, BB)
        inside_block = block < last
        inside = inside_row[:, None] & inside_block[None, :]
        codes = tl.load(blocks_ptr + row_start + block[None, :], mask=inside, other=0)
        scale_byte = tl.load(scale_ptr + row_start + block[None, :], mask=inside, other=0)
        scale = e4m3_to_float(scale_byte.to(tl.int32)) * SCALE_OFFSET
        x_place = block[:, None] * BM + row_m[None, :]
        for half in tl.static_range(2):
            word = (codes >> (32 * half)).to(tl.int32)
            for i in tl.static_range(8):
                weight = e2m1_bits_to_float(word << (28 - 4 * i)) * scale
                part_ptr = x_ptr + (8 * half + i) * blocks_per_row * BM
                x = tl.load(part_ptr + x_place, mask=inside_block[:, None], other=0.0)
                acc = tl.dot(weight.to(x_ptr.dtype.element_ty), x, acc)
    place = tl.program_id(1).to(tl.int64) * m * n + row_m[None, :] * n + row[:, None]
    tl.store(partial_ptr + place, acc, mask=inside_row[:, None] & inside_m[None, :])


@triton.jit
def add_pieces_kernel(
    partial_ptr,
    global_scale_ptr,
    bias_ptr,
    out_ptr,
    size,
    n,
    pieces,
    HAS_BIAS: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program: SIZE values of y, flattened; REST is what the sums still lack beside the global scale."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < size
    acc = tl.zeros((SIZE,), tl.float32)
    for piece in range(pieces):
        acc += tl.load(partial_ptr + piece * size + place, mask=inside, other=0.0)
    y = acc * (tl.load(global_scale_ptr) * REST)
    if HAS_BIAS:
        y += tl.load(bias_ptr + place % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def num_pieces(n: int, blocks_per_row: int, device: torch.device) -> int:
    """Into how many pieces K is cut: enough to give each multiprocessor a few programs."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // triton.cdiv(n, BLOCK_N)
    return max(1, min(wanted, triton.cdiv(blocks_per_row, 2 * BLOCKS)))


def small_matmul_into(
    out: Tensor, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Fill out [M, N] with x [M, K] @ W^T + bias, 1 <= M <= 64; x and out bf16 or fp16, contiguous."""
    m, n = out.shape
    assert m <= MAX_ROWS
    blocks = as_blocks(qdata)
    blocks_per_row = blocks.shape[1]
    steps = triton.cdiv(triton.cdiv(blocks_per_row, BLOCKS), num_pieces(n, blocks_per_row, out.device))
    pieces = triton.cdiv(blocks_per_row, steps * BLOCKS)
    block_m = max(16, triton.next_power_of_2(m))
    x_parts = torch.empty(BLOCK_SIZE.value, blocks_per_row, block_m, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(blocks_per_row, PART_BLOCKS),)
    part_kernel[grid](x.contiguous(), x_parts, m, blocks_per_row, BM=block_m, BB=PART_BLOCKS)
    partial = torch.empty(pieces, m, n, dtype=torch.float32, device=out.device)
    small_matmul_kernel[(triton.cdiv(n, BLOCK_N), pieces)](
        x_parts,
        blocks,
        scale.contiguous(),
        partial,
        m,
        n,
        blocks_per_row,
        steps * BLOCKS,
        BM=block_m,
        BN=BLOCK_N,
        BB=BLOCKS,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    size = m * n
    bias_or_any = out if bias is None else bias
    add_pieces_kernel[(triton.cdiv(size, 1024),)](
        partial, global_scale, bias_or_any, out, size, n, pieces, HAS_BIAS=bias is not None, REST=REST, SIZE=1024
    )
    return out


def small_matmul(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ W^T + bias in x's dtype; arguments as `small_matmul_into`'s."""
    out = torch.empty(x.shape[0], qdata.shape[0], dtype=x.dtype, device=x.device)
    return small_matmul_into(out, x, qdata, scale, global_scale, bias)
