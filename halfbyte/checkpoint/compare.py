"""Bytes of two checkpoints' tensors compared where they lie, through two small buffers that stay in the cache.

Reading whole tensors first would spend most of the time on fresh memory: a page that is touched once costs more than
its bytes do (benchmarks/results/convert_speed.md).
"""

import torch
from torch import Tensor

from halfbyte.checkpoint.shards import Shards

BUFFER_BYTES = 1 << 20


def count_unequal_bytes(first: Shards, first_key: str, second: Shards, second_key: str) -> int:
    """How many bytes of two tensors of one size differ."""
    size, wrong = first.spec(first_key).size_bytes, 0
    assert size == second.spec(second_key).size_bytes, f"{first_key} and {second_key} differ in size"
    buffers = torch.empty(2, min(size, BUFFER_BYTES), dtype=torch.uint8)
    for start in range(0, size, BUFFER_BYTES):
        x, y = buffers[:, : min(BUFFER_BYTES, size - start)]
        first.read_into(first_key, start, x)
        second.read_into(second_key, start, y)
        if not same_bytes(x, y):
            wrong += int((x != y).sum())
    return wrong


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Equality of two uint8 tensors of one shape, eight bytes at a time where that divides."""
    x, y = x.reshape(-1), y.reshape(-1)
    if x.numel() % 8 == 0:
        x, y = x.view(torch.int64), y.view(torch.int64)
    return torch.equal(x, y)
