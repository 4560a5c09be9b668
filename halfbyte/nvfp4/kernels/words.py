"""Packed codes seen as integers of eight or sixteen codes, column 0 in the lowest nibble."""

import torch
from torch import Tensor


def as_words(qdata: Tensor) -> Tensor:
    """uint8 [N, K/2] -> int32 [N, K/8], eight codes each."""
    return as_integers(qdata, torch.int32)


def as_blocks(qdata: Tensor) -> Tensor:
    """uint8 [N, K/2] -> int64 [N, K/16], the sixteen codes that share a block scale."""
    return as_integers(qdata, torch.int64)


def four_at_a_time(x: Tensor) -> Tensor:
    """Rows of 16-bit values [M, K] as int64 [M * K/4], copied where they do not begin at a multiple of 8 bytes."""
    if not x.is_contiguous() or x.storage_offset() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.reshape(-1).view(torch.int64)


def as_integers(qdata: Tensor, dtype: torch.dtype) -> Tensor:
    """A view where layout and alignment allow; a slice of a flat buffer may begin anywhere."""
    if not qdata.is_contiguous() or qdata.storage_offset() % dtype.itemsize:
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    return qdata.view(dtype)
