"""NaN and infinity among dense values: one of them in a norm makes every answer NaN, so no file is written with it."""

import math
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.format import row_chunks

E4M3_NAN = 0x7F
CHUNK_VALUES = 1 << 22


def count_nonfinite(value: Tensor) -> int:
    """How many values of a floating tensor are NaN or infinite; 0 for other dtypes. Looks at each value once."""
    if value.dtype == torch.float8_e4m3fn:
        return int(((value.view(torch.uint8) & E4M3_NAN) == E4M3_NAN).sum())
    if not value.is_floating_point() or value.dtype.itemsize == 1 or not value.numel():
        return 0
    if torch.isfinite(torch.stack(torch.aminmax(value))).all():
        return 0
    return int((~torch.isfinite(value)).sum())


def check_finite(value: Tensor, name: str, where: Path) -> None:
    """ValueError naming the tensor when it holds a NaN or an infinity."""
    refuse(count_nonfinite(value), value.numel(), name, where)


def check_stored(shards: Shards, key: str) -> None:
    """`check_finite` of a tensor on disk, a few rows at a time."""
    refuse(count_stored(shards, key), math.prod(shards.spec(key).shape), key, shards.path_of(key))


def count_stored(shards: Shards, key: str) -> int:
    """`count_nonfinite` of a tensor on disk, a few rows at a time."""
    shape = shards.spec(key).shape
    if len(shape) < 2:
        return count_nonfinite(shards.read(key))
    chunks = row_chunks(shape[0], math.prod(shape[1:]), CHUNK_VALUES)
    return sum(count_nonfinite(shards.read_rows(key, rows.start, rows.stop)) for rows in chunks)


def refuse(bad: int, values: int, name: str, where: Path) -> None:
    if bad:
        raise ValueError(
            f"{where}: {name} holds {bad} NaN or infinite values of {values}, expected finite ones: the model would "
            "answer NaN. The file is damaged, or its training diverged; take another copy or checkpoint."
        )
