"""Digest of an NVFP4 weight: the same on every device, for every sharding, and in all three file formats.

Over the row-major components: one word of eight code bytes and one byte of scale for each block of 16 (so that a shard
may begin at any block), and the tensor scale as the value that multiplies. Formats that store its reciprocal, or
swizzled block scales, are converted before.
"""

import hashlib
from collections.abc import Mapping

import torch

from halfbyte.numerics.digest import digest_words
from halfbyte.numerics.hashing import MASK
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts

CODES, SCALE, GLOBAL_SCALE = 0, 1, 2


def shard_digest(parts: NVFP4Parts, *, row_offset: int = 0, column_offset: int = 0, in_features: int = 0) -> int:
    """Share of a piece's codes and block scales; the sum over all pieces, plus `global_scale_digest` once, is the
    weight's digest modulo 2^64.

    row_offset, column_offset   where the piece begins in the whole weight; the column a multiple of 16.
    in_features                 of the whole weight; default: the piece's.
    """
    n, k = parts.shape
    place = {
        "row_offset": row_offset,
        "column_offset": column_offset // BLOCK_SIZE,
        "width": (in_features or k) // BLOCK_SIZE,
    }
    codes = parts.qdata.contiguous().view(-1)
    if codes.storage_offset() % 8:  # a slice of a mapped file may begin anywhere
        codes = codes.clone()
    words = codes.view(torch.int64).view(n, k // BLOCK_SIZE)
    scale_bytes = parts.scale.view(torch.uint8).to(torch.int64)
    code_digest = digest_words(words, component=CODES, **place)
    return (code_digest + digest_words(scale_bytes, component=SCALE, **place)) & MASK


def global_scale_digest(parts: NVFP4Parts) -> int:
    """Share of the tensor scale."""
    word = parts.global_scale.detach().reshape(1, 1).view(torch.int32).to(torch.int64)
    return digest_words(word, component=GLOBAL_SCALE)


def weight_digest(parts: NVFP4Parts) -> int:
    """64-bit digest of a whole weight."""
    return (shard_digest(parts) + global_scale_digest(parts)) & MASK


def model_digest(weights: Mapping[str, tuple[tuple[int, int], int]]) -> str:
    """SHA-256, in hex, over the sorted lines "name NxK digest" of {name: (shape, weight digest)}."""
    lines = [f"{name} {shape[0]}x{shape[1]} {digest:016x}\n" for name, (shape, digest) in sorted(weights.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
