"""Dense to NVFP4 in one pass over blocks of 16: 2 bytes read (bf16) and 0.5625 written a value.

Each operation is the reference's (../quantize.py), division for division, so codes and scales are equal bit for bit.
Triton's `/` is an approximation in fp32: the divisions are `div_rn`. The largest magnitude is taken over the integers
with the floats' bits, where a NaN is the largest of all; a block with a NaN gets a NaN scale, as in the reference.

Arithmetic limits it, so a thread has whole blocks: read as two halves of eight values, none of the four divisions is
done twice and nothing is exchanged between threads (with a block shared by two threads it took 1.5 times as long).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    e4m3_to_float,
    float_to_e4m3,
    magnitude_code,
)
from halfbyte.nvfp4.kernels.words import as_blocks

BLOCK_SIZE = tl.constexpr(16)
HALF_BLOCK = tl.constexpr(8)
NUM_WARPS = 4
NUM_BLOCKS = 128  # blocks of 16 a program


@triton.jit
def largest_magnitude(x):
    """int32 [B] with the bits of the largest of fp32 [B, 8]."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def block_scale(amax, global_scale):
    """fp32 [B] -> (E4M3 bytes as int32 [B], what the values are multiplied with before rounding, fp32 [B])."""
    wanted = tl.div_rn(tl.div_rn(amax, E2M1_MAX), global_scale)
    wanted = tl.where(wanted < E4M3_MIN_NORMAL, E4M3_MIN_NORMAL, tl.where(wanted > E4M3_MAX, E4M3_MAX, wanted))
    byte = float_to_e4m3(wanted)
    return byte, tl.div_rn(tl.div_rn(1.0, global_scale), e4m3_to_float(byte))


@triton.jit
def packed_codes(x, multiplier):
    """fp32 [B, 8] and its blocks' multipliers [B] -> int32 [B], eight codes."""
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    code = magnitude_code(tl.abs(x) * multiplier[:, None]) | sign
    return tl.sum(code << (4 * tl.arange(0, HALF_BLOCK))[None, :], axis=1)


@triton.jit
def quantize_kernel(x_ptr, global_scale_ptr, blocks_ptr, scale_ptr, num_blocks, BLOCKS: tl.constexpr):
    """One program: BLOCKS blocks of 16, of the flattened matrix."""
    start = tl.program_id(0).to(tl.int64) * BLOCKS
    left = tl.minimum(num_blocks - start, BLOCKS).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    inside = block < left
    x_ptr += start * BLOCK_SIZE + block[:, None] * BLOCK_SIZE + tl.arange(0, HALF_BLOCK)[None, :]
    low = tl.load(x_ptr, mask=inside[:, None], other=0.0).to(tl.float32)
    high = tl.load(x_ptr + HALF_BLOCK, mask=inside[:, None], other=0.0).to(tl.float32)
    amax = tl.maximum(largest_magnitude(low), largest_magnitude(high)).to(tl.float32, bitcast=True)
    byte, multiplier = block_scale(amax, tl.load(global_scale_ptr))
    first = packed_codes(low, multiplier).to(tl.uint32, bitcast=True).to(tl.int64)
    codes = first | (packed_codes(high, multiplier).to(tl.int64) << 32)
    tl.store(blocks_ptr + start + block, codes, mask=inside)
    tl.store(scale_ptr + start + block, byte.to(tl.uint8), mask=inside)


def quantize_into(qdata: Tensor, scale: Tensor, x: Tensor, global_scale: Tensor) -> None:
    """Fill qdata uint8 [N, K/2] and scale uint8 [N, K/16], both contiguous, from x [N, K] and global_scale fp32 []."""
    x = x.contiguous()
    num_blocks = scale.numel()
    if num_blocks:
        grid = (triton.cdiv(num_blocks, NUM_BLOCKS),)
        quantize_kernel[grid](
            x,
            global_scale,
            as_blocks(qdata),
            scale,
            num_blocks,
            BLOCKS=NUM_BLOCKS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(qdata uint8 [N, K/2], scale uint8 [N, K/16]) of x [N, K], bf16, fp16 or fp32."""
    n, k = x.shape
    qdata = torch.empty(n, k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(n, k // BLOCK_SIZE.value, dtype=torch.uint8, device=x.device)
    quantize_into(qdata, scale, x, global_scale)
    return qdata, scale
