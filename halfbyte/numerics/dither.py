"""A fixed offset in [0, 1) for every block of sixteen of a weight, from (seed, name, row, block) and nothing else.

A place on the line of codes plus its offset, rounded down, is the new code: a value a share r of the way from one code
to the next becomes the next one for a share r of all offsets. So over many weights the right share moves, and a change
smaller than a step survives on average; and since the offset depends only on where the weight is, trainer and writer,
CPU and GPU, any rank and any sharding round alike. Nothing is stored.

The sixteen weights of a block share one: merged files score as with one for each weight, and a sixteenth of the
hashing is left (benchmarks/results/2026-12-01-lora-quality-h200.md).

Rows and blocks are hashed once each in 64 bits (SplitMix64); an offset mixes the exclusive or of its row's and its
block's 32 bits with a 32-bit finalizer (two multiplications; constants from the search "hash-prospector" by
C. Wellons, 2018). Rejected: a generator's stream (depends on the sharding), and Philox (ten rounds of wide products).
"""

import torch
from torch import Tensor

from halfbyte.numerics.hashing import indexed_keys, key64

M1, M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32
OFFSET_BITS = 20  # places go to 7 and fp32 has 24 bits: so many can follow the point without a rounding


def row_keys(seed: int, name: str, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 [count]: the share of rows start, start + 1, ... in their offsets' hashes."""
    return low_word(indexed_keys(key64("row", seed, name), start, count, device))


def block_keys(seed: int, name: str, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 [count]: the share of blocks start, start + 1, ... of sixteen columns in their offsets' hashes."""
    return low_word(indexed_keys(key64("block", seed, name), start, count, device))


def offsets(rows: Tensor, blocks: Tensor) -> Tensor:
    """int32 [n, k/16] in [0, 2^OFFSET_BITS), in units of 2^-OFFSET_BITS, for row keys [n] and block keys [k/16]."""
    x = rows.unsqueeze(-1) ^ blocks
    x ^= (x >> 16) & 0xFFFF
    x *= M1
    x ^= (x >> 15) & 0x1FFFF
    x *= M2
    x ^= (x >> 16) & 0xFFFF
    return (x >> (32 - OFFSET_BITS)) & ((1 << OFFSET_BITS) - 1)


def low_word(keys: Tensor) -> Tensor:
    """The low 32 bits of int64 [count], as int32 [count]."""
    return keys.view(torch.int32)[::2].contiguous()
