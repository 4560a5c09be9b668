"""A fixed threshold in (0, 1) for every element of a weight, from (seed, name, row, column) and nothing else.

A value a share r of the way from one code to the next becomes the next code when r > t. Over many weights the right
share moves, so a change smaller than a step survives on average; and since t depends only on where the weight is,
trainer and writer, CPU and GPU, any rank and any sharding round alike. Nothing is stored.

Rows and columns are hashed once each in 64 bits (SplitMix64); an element mixes the exclusive or of its row's and its
column's 32 bits with a 32-bit finalizer (two multiplications; constants from the search "hash-prospector" by
C. Wellons, 2018). Rejected: a generator's stream (depends on the sharding), and Philox (ten rounds of wide products).
"""

import torch
from torch import Tensor

from halfbyte.numerics.hashing import indexed_keys, key64

M1, M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32
HALF_STEP = 2.0**-24  # thresholds are the odd multiples, so never 0 or 1, and exact in fp32


def row_keys(seed: int, name: str, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 [count]: the share of rows start, start + 1, ... in their elements' hashes."""
    return low_word(indexed_keys(key64("row", seed, name), start, count, device))


def column_keys(seed: int, name: str, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 [count]: the share of columns start, start + 1, ... in their elements' hashes."""
    return low_word(indexed_keys(key64("column", seed, name), start, count, device))


def thresholds(rows: Tensor, columns: Tensor) -> Tensor:
    """fp32 [n, k] in (0, 1), odd multiples of 2^-24, for row keys [n] and column keys [k]."""
    x = rows.unsqueeze(-1) ^ columns
    x ^= (x >> 16) & 0xFFFF
    x *= M1
    x ^= (x >> 15) & 0x1FFFF
    x *= M2
    x ^= (x >> 16) & 0xFFFF
    x = (x >> 9) & 0x7FFFFF
    return (x * 2 + 1).float().mul_(HALF_STEP)


def low_word(keys: Tensor) -> Tensor:
    """The low 32 bits of int64 [count], as int32 [count]."""
    return keys.view(torch.int32)[::2].contiguous()
