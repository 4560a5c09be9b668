"""A 64-bit digest of a tensor's bytes that adds up over its shards, and needs no order of visiting.

Each 8-byte word, with its component's number and its place in the whole tensor, is mixed to 64 bits; the digest is the
sum modulo 2^64. So ranks add what they hold, on whatever device it is. It finds damage and mix-ups; it is no defence
against forgery (files are identified by SHA-256).
"""

import torch
from torch import Tensor

from halfbyte.numerics.hashing import GOLDEN, MASK, mix64, signed

COMPONENT_STEP = 0xD1342543DE82EF95  # odd; moves the components' positions apart


def digest_words(words: Tensor, *, component: int, row_offset: int = 0, column_offset: int = 0, width: int = 0) -> int:
    """Sum of the mixed words of a piece of a matrix.

    words          int64 [n, w], the piece.
    component      number of the tensor that the matrix is, so that swapped components differ.
    row_offset, column_offset   where the piece begins in the whole matrix, in rows and words.
    width          words in a row of the whole matrix; default: the piece's.
    returns        0 <= digest < 2^64.
    """
    n, piece_width = words.shape
    width = width or piece_width
    total = 0
    for start in range(0, n, rows := max(1, (1 << 18) // max(piece_width, 1))):
        chunk = words[start : start + rows]
        row = torch.arange(len(chunk), device=words.device) + (row_offset + start)
        column = torch.arange(piece_width, device=words.device) + column_offset
        position = row.unsqueeze(-1) * width + column
        place = mix64(position.mul_(signed(GOLDEN)).add_(signed((component + 1) * COMPONENT_STEP)))
        total += int(mix64(place.add_(chunk)).sum().item())
    return total & MASK
