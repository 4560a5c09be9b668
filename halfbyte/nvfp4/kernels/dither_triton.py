"""The dither's keys and thresholds (numerics/dither.py) in Triton, bit for bit.

Rows' and columns' keys are hashed in 64 bits, once each, by a small kernel of their own; an element mixes two of them
in 32 bits, inside the kernel that needs the threshold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.numerics.hashing import signed

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
BLOCK = 256


@triton.jit
def mix64(x):
    """SplitMix64's finalizer, uint64."""
    x = (x ^ (x >> 30)) * tl.full([], FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], SECOND, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def keys_kernel(out_ptr, key, count, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """out[i // STRIDE + (i % STRIDE) * (count // STRIDE)] = low word of the hash of (key, i)."""
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    hashed = mix64(index.to(tl.uint64) * tl.full([], GOLDEN, tl.uint64) + key.to(tl.uint64))
    place = index // STRIDE + (index % STRIDE) * (count // STRIDE)
    tl.store(out_ptr + place, hashed.to(tl.int32), mask=index < count)


@triton.jit
def threshold(row_key, column_key):
    """fp32 in (0, 1) of an element, from int32 keys.

    The hash's top 23 bits become the mantissa of a float in [1, 2), so that one exact subtraction ends the conversion.
    """
    x = (row_key ^ column_key).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    one_and_more = ((x >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return one_and_more - (1 - 2.0**-24)


def keys(key: int, count: int, device: torch.device, *, stride: int = 1) -> Tensor:
    """int32 [count]: low words of the hashes of (key, 0), (key, 1), ...; index i lies at [i % stride, i // stride]."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    keys_kernel[(triton.cdiv(count, BLOCK),)](out, signed(key), count, STRIDE=stride, SIZE=BLOCK)
    return out
