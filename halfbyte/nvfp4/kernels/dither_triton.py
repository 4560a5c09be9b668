"""The dither's keys and offsets (numerics/dither.py) in Triton, bit for bit.

Rows' and blocks' keys are hashed in 64 bits, once each, by a small kernel of their own; an offset mixes two of them in
32 bits, inside the kernel that needs it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.numerics import dither
from halfbyte.numerics.hashing import signed

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
OFFSET_BITS = tl.constexpr(dither.OFFSET_BITS)
PROGRAM = 256


@triton.jit
def mix64(x):
    """SplitMix64's finalizer, uint64."""
    x = (x ^ (x >> 30)) * tl.full([], FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], SECOND, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def keys_kernel(row_ptr, block_ptr, row_key, block_key, num_rows, num_blocks, SIZE: tl.constexpr):
    """Low words of the hashes of (row_key, 0..num_rows-1) and of (block_key, 0..num_blocks-1).

    Grid: enough programs of SIZE for the longer of the two, by 2.
    """
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    turned = index.to(tl.uint64) * tl.full([], GOLDEN, tl.uint64)
    if tl.program_id(1) == 0:
        tl.store(row_ptr + index, mix64(turned + row_key.to(tl.uint64)).to(tl.int32), mask=index < num_rows)
    else:
        tl.store(block_ptr + index, mix64(turned + block_key.to(tl.uint64)).to(tl.int32), mask=index < num_blocks)


@triton.jit
def offset(row_key, block_key):
    """A block's offset from int32 keys, int32 in [0, 2^OFFSET_BITS)."""
    x = (row_key ^ block_key).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> (32 - OFFSET_BITS)).to(tl.int32, bitcast=True)


def keys(row_key: int, block_key: int, num_rows: int, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 keys of rows and of blocks; the keys given are 64 bits each."""
    rows, blocks = torch.empty(num_rows + num_blocks, dtype=torch.int32, device=device).split((num_rows, num_blocks))
    grid = (triton.cdiv(max(num_rows, num_blocks), PROGRAM), 2)
    keys_kernel[grid](rows, blocks, signed(row_key), signed(block_key), num_rows, num_blocks, SIZE=PROGRAM)
    return rows, blocks
