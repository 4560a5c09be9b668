"""64-bit mixing of integers in torch's int64, with the wrap-around of unsigned arithmetic; the same on every device.

The mixer is the finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014;
constants of Stafford's variant 13). torch has no unsigned shift, so the sign is masked off after each shift.
"""

import hashlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """The int64 with the bits of value modulo 2^64."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def mix64(x: Tensor) -> Tensor:
    """A bijection of int64 in which every input bit moves every output bit. Works in place on x, and returns it."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        x *= signed(multiplier)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def key64(*fields: object) -> int:
    """64 bits that name the fields (their text), from SHA-256."""
    text = "\0".join(str(field) for field in fields)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def indexed_keys(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 [count]: for each index start, start + 1, ... a hash of (key, index)."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    return mix64(index.mul_(signed(GOLDEN)).add_(signed(key)))
