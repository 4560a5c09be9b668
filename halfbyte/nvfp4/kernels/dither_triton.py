"""The dither's keys and offsets (numerics/dither.py) in Triton, bit for bit.

Rows' and columns' keys are hashed in 64 bits, once each, by a small kernel of their own; an element mixes two of them
in 32 bits, inside the kernel that needs the offset.
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
BLOCK = 256


@triton.jit
def mix64(x):
    """SplitMix64's finalizer, uint64."""
    x = (x ^ (x >> 30)) * tl.full([], FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], SECOND, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def keys_kernel(row_ptr, column_ptr, row_key, column_key, n, k, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Low words of the hashes of (row_key, 0..n-1), and of (column_key, 0..k-1), column i to [i % STRIDE, i // STRIDE].

    Grid: enough programs of SIZE for the longer of the two, by 2.
    """
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    turned = index.to(tl.uint64) * tl.full([], GOLDEN, tl.uint64)
    if tl.program_id(1) == 0:
        tl.store(row_ptr + index, mix64(turned + row_key.to(tl.uint64)).to(tl.int32), mask=index < n)
    else:
        place = index // STRIDE + (index % STRIDE) * (k // STRIDE)
        tl.store(column_ptr + place, mix64(turned + column_key.to(tl.uint64)).to(tl.int32), mask=index < k)


@triton.jit
def offset(row_key, column_key):
    """An element's offset from int32 keys, int32 in [0, 2^OFFSET_BITS)."""
    x = (row_key ^ column_key).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    return (x >> (32 - OFFSET_BITS)).to(tl.int32, bitcast=True)


def keys(row_key: int, column_key: int, n: int, k: int, device: torch.device, *, stride: int) -> tuple[Tensor, Tensor]:
    """int32 keys of n rows and of k columns; column i lies at [i % stride, i // stride]. The keys are 64 bits each."""
    rows, columns = torch.empty(n + k, dtype=torch.int32, device=device).split((n, k))
    grid = (triton.cdiv(max(n, k), BLOCK), 2)
    keys_kernel[grid](rows, columns, signed(row_key), signed(column_key), n, k, STRIDE=stride, SIZE=BLOCK)
    return rows, columns
