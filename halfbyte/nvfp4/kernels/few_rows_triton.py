"""y = x @ W^T for up to eight rows of x, straight from the 4-bit weight, which is read once, in one or two launches.

Code times block scale has at most 6 significant bits, so it is exact in bf16 and fp16, and tensor cores multiply it;
the global scale comes after. W is the left operand (N is its M), for x has too few rows to fill one. Instructions of
decoding limit the kernel, so two codes are decoded by each: codes i and i + 4 of a word of eight lie 16 bits apart,
where two 16-bit values of a register are to be. The four pairs of a word go to four products, whose K runs over (word,
half of it); x is read four columns at a time as one integer, of which the products take a part each. Each warp has its
own part of K and all rows of W, and the warps' sums are added in the end: so N alone gives every multiprocessor work,
and x needs no copy. Where it does not, K is also cut into pieces for several programs, added in a fixed order.

Measured on an H200: 1.3 to 1.65 times as fast as dense bf16 with two rows, 1.07 to 1.3 with eight; from nine rows on,
where the operands of the products fill the registers, small_matmul_triton.py is faster, and with one row
matvec_triton.py. Rejected: a product a code, decoded through fp32 (7.7 instructions a weight; this takes 3.5), and a
scale applied to sums of sixteen products, which costs a multiplication a weight and row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e4m3_to_float
from halfbyte.nvfp4.kernels.small_matmul_triton import add_pieces_kernel
from halfbyte.nvfp4.kernels.words import as_blocks, four_at_a_time

# As bf16 a decoded code is value * 2^-126, as fp16 value * 2^-14. The scale brings back as much as its type holds (448
# * 2^118 and 448 * 2^7 are finite; products are multiples of 2^-10 that both types hold), the end the rest.
BF16_SCALE, BF16_REST = tl.constexpr(2.0**118), tl.constexpr(2.0**8)
FP16_SCALE, FP16_REST = tl.constexpr(2.0**7), tl.constexpr(2.0**7)
MAX_ROWS = 8
BLOCK_N = 64
PROGRAMS_PER_MULTIPROCESSOR = 2
BLOCKS, NUM_WARPS, NUM_STAGES = 8, 4, 3  # blocks of sixteen columns a warp and step
# The same where scales are read by the byte: then a thread gets four blocks, and eight do not go round.
UNPAIRED = 16, 2, 2


@triton.jit
def decode_pair(word, i: tl.constexpr, BF16: tl.constexpr):
    """Codes i and i + 4 of a word as two 16-bit floats in an int32, times 2^-126 (bf16) or 2^-14 (fp16).

    The sign goes to bit 15 of a half, exponent and mantissa to where the lowest two exponent bits and the highest
    mantissa bit are. For bf16 the two copies of a code do not overlap, and one multiplication makes both.
    """
    if BF16:
        code = (word >> (8 * (i // 2))) & (0x000F000F << (4 * (i % 2)))
        up: tl.constexpr = 4096 >> (4 * (i % 2))
        pair = (code * (up + (up >> 6))) & -0x7E3F7E40
    else:
        magnitude = word >> 3 if i == 3 else word << (9 - 4 * i)
        pair = (magnitude & 0x0E000E00) | ((word << (12 - 4 * i)) & -0x7FFF8000)
    return pair


@triton.jit
def half_of_pair(pair, half: tl.constexpr, BF16: tl.constexpr):
    """The 16-bit float in the lower or upper half of an int32, as fp32: what the interpreter can compute with."""
    bits = (pair >> (16 * half)) & 0xFFFF
    if BF16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def twice(scale, BF16: tl.constexpr):
    """fp32 -> an int32 that holds it in both halves as 16-bit float."""
    if BF16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [scale], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def times(pair, scale, BF16: tl.constexpr):
    """Product of two pairs; compute capability 8.0 multiplies bf16 only by a fused multiply-add."""
    if BF16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [pair, scale],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [pair, scale], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def few_rows_kernel(
    x_ptr,  # int64 [M, K/4], four values each
    blocks_ptr,
    scale_ptr,  # uint8 [N, K/16], or int16 [N, K/32] if PAIRED
    global_scale_ptr,
    bias_ptr,
    out_ptr,  # [M, N], or fp32 [pieces, M, N] if PARTIAL
    m,
    n,
    blocks_per_row,
    blocks_per_piece,
    PARTIAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BF16: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    W: tl.constexpr,
):
    """One program: all rows of x, BN columns of y, one piece of K, of which each of W warps takes a part.

    EVEN: K is a multiple of what the warps take in a step.
    FAST: on a GPU, two values an instruction; else what the interpreter can run, the same values in fp32.
    """
    part = tl.arange(0, W)
    row, row_m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    inside_row, inside_m = row < n, row_m < m
    row_start = tl.minimum(row, n - 1)[None, :, None].to(tl.int64) * blocks_per_row  # a mask takes more in the loop
    first = tl.program_id(1) * blocks_per_piece
    last = tl.minimum(first + blocks_per_piece, blocks_per_row)
    half_word = tl.arange(0, 2 * BB)
    dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    acc = tl.zeros((W, BN, BM), tl.float32)
    for start in range(first, last, W * BB):
        block = start + part[:, None] * BB + tl.arange(0, BB)[None, :]  # [W, BB]
        inside = EVEN | (block < last)[:, None, :]
        codes = tl.load(blocks_ptr + row_start + block[:, None, :], mask=inside, other=0)
        if PAIRED:
            two = start // 2 + part[:, None] * (BB // 2) + tl.arange(0, BB // 2)[None, :]
            inside_two = EVEN | (two < last // 2)[:, None, :]
            both = tl.load(scale_ptr + row_start // 2 + two[:, None, :], mask=inside_two, other=0)
            both = both.to(tl.uint16, bitcast=True).to(tl.int32)
            scale_byte = tl.reshape(tl.join(both & 0xFF, both >> 8), (W, BN, BB))
        else:
            scale_byte = tl.load(scale_ptr + row_start + block[:, None, :], mask=inside, other=0).to(tl.int32)
        scale = e4m3_to_float(scale_byte) * (BF16_SCALE if BF16 else FP16_SCALE)
        if FAST:
            scales = twice(scale, BF16)
        x_block = start + part[:, None] * BB + (half_word // 2)[None, :]  # [W, 2 BB]
        x_place = row_m[None, None, :] * (blocks_per_row * 4) + (x_block * 4 + (half_word % 2)[None, :])[:, :, None]
        inside_x = (EVEN | (x_block < last))[:, :, None] & inside_m[None, None, :]
        for of_block in tl.static_range(2):
            word = (codes >> (32 * of_block)).to(tl.int32)
            four = tl.load(x_ptr + x_place + 2 * of_block, mask=inside_x, other=0)
            for i in tl.static_range(4):
                pair = decode_pair(word, i, BF16)
                x = (four >> (16 * i)).to(tl.int16)
                if FAST:
                    pair = times(pair, scales, BF16)
                    low = pair.to(tl.int16).to(dtype, bitcast=True)
                    high = (pair >> 16).to(tl.int16).to(dtype, bitcast=True)
                    x = x.to(dtype, bitcast=True)
                else:
                    low = half_of_pair(pair, 0, BF16) * scale
                    high = half_of_pair(pair, 1, BF16) * scale
                    x = half_of_pair(x.to(tl.int32), 0, BF16)
                acc = tl.dot(tl.reshape(tl.join(low, high), (W, BN, 2 * BB)), x, acc)
    y = tl.sum(acc, axis=0)
    place = row_m[None, :] * n + row[:, None]
    inside_y = inside_row[:, None] & inside_m[None, :]
    if PARTIAL:
        tl.store(out_ptr + tl.program_id(1).to(tl.int64) * m * n + place, y, mask=inside_y)
    else:
        y *= tl.load(global_scale_ptr) * (BF16_REST if BF16 else FP16_REST)
        if HAS_BIAS:
            y += tl.load(bias_ptr + row, mask=inside_row, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside_y)


def num_pieces(programs: int, num_steps: int, device: torch.device) -> int:
    """Into how many pieces K is cut: enough to give each multiprocessor two programs."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs, num_steps))


def few_rows_into(
    out: Tensor, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Fill out [M, N] with x [M, K] @ W^T + bias, 1 <= M <= 8; x and out of one dtype, bf16 or fp16, contiguous."""
    m, n = out.shape
    assert m <= MAX_ROWS
    blocks = as_blocks(qdata)
    blocks_per_row = blocks.shape[1]
    scale = scale.contiguous()
    paired = blocks_per_row % 2 == 0 and scale.storage_offset() % 2 == 0
    warp_blocks, num_warps, num_stages = (BLOCKS, NUM_WARPS, NUM_STAGES) if paired else UNPAIRED
    step = num_warps * warp_blocks
    num_steps = triton.cdiv(blocks_per_row, step)
    programs = triton.cdiv(n, BLOCK_N)
    steps = triton.cdiv(num_steps, num_pieces(programs, num_steps, out.device))  # of a piece
    pieces = triton.cdiv(num_steps, steps)
    target = out if pieces == 1 else torch.empty(pieces, m, n, dtype=torch.float32, device=out.device)
    is_bf16 = x.dtype == torch.bfloat16
    bias_or_any = out if bias is None else bias
    few_rows_kernel[(programs, pieces)](
        four_at_a_time(x),
        blocks,
        scale.view(torch.int16) if paired else scale,
        global_scale,
        bias_or_any,
        target,
        m,
        n,
        blocks_per_row,
        steps * step,
        PARTIAL=pieces > 1,
        HAS_BIAS=bias is not None,
        BF16=is_bf16,
        PAIRED=paired,
        EVEN=blocks_per_row % step == 0,
        FAST=out.is_cuda,
        BM=MAX_ROWS,
        BN=BLOCK_N,
        BB=warp_blocks,
        W=num_warps,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if pieces > 1:
        size, rest = m * n, (BF16_REST if is_bf16 else FP16_REST).value
        add_pieces_kernel[(triton.cdiv(size, 256),)](
            target, global_scale, bias_or_any, out, size, n, pieces, HAS_BIAS=bias is not None, REST=rest, SIZE=256
        )
    return out


def few_rows(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] @ W^T + bias in x's dtype; arguments as `few_rows_into`'s."""
    out = torch.empty(x.shape[0], qdata.shape[0], dtype=x.dtype, device=x.device)
    return few_rows_into(out, x, qdata, scale, global_scale, bias)
