"""Packed codes seen as 32-bit words: eight codes, column 8j in the lowest nibble."""

import torch
from torch import Tensor

WORD_BYTES = 4


def as_words(qdata: Tensor) -> Tensor:
    """uint8 [N, K/2] -> int32 [N, K/8], a view where layout and alignment allow (a slice of a flat buffer may not)."""
    if not qdata.is_contiguous() or qdata.storage_offset() % WORD_BYTES:
        qdata = qdata.clone(memory_format=torch.contiguous_format)
    return qdata.view(torch.int32)
