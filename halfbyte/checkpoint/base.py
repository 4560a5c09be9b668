"""An NVFP4 base opened for streaming: where each of the model's weights and parameters lies in the files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.formats.base import Format, StoredWeight
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.source import DenseSource, open_source


@dataclass(frozen=True)
class Base:
    """An opened NVFP4 base. weights: model's fqn -> stored; dense: model's parameter -> key."""

    folder: Path
    config: dict[str, Any]
    format: Format
    shards: Shards
    skeleton: Skeleton
    weights: dict[str, StoredWeight]
    dense: dict[str, str]

    @property
    def dtype(self) -> torch.dtype:
        return self.skeleton.dtype


@contextmanager
def open_base(path: str | os.PathLike[str]) -> Iterator[Base]:
    """ValueError when the folder holds no NVFP4 weight."""
    folder = local_folder(path)
    config = read_config(folder)
    format = detect(folder, config)
    if format is None:
        raise ValueError(
            f"{folder}: found a dense model, expected an NVFP4 base. PEFT itself merges into dense models."
        )
    with Shards(folder) as shards:
        skeleton = Skeleton.from_folder(folder)
        stored = format.find(shards, config, lambda key: skeleton.target(key).name)
        if not stored:
            raise ValueError(f"{folder}: holds no NVFP4 weight.")
        weights = {skeleton.target(w.weight_name).name.removesuffix(".weight"): w for w in stored.values()}
        claimed = {key for weight in stored.values() for key in weight.keys.values()}
        dense = {skeleton.target(key).name: key for key in shards if key not in claimed}
        yield Base(folder, config, format, shards, skeleton, weights, dense)


@contextmanager
def dense_base(path: str | os.PathLike[str], base: Base) -> Iterator[dict[str, tuple[DenseSource, str]]]:
    """Model's fqn of each NVFP4 layer -> where its dense original is. ValueError when one is missing."""
    source = open_source(path)
    try:
        keys = source.keys()
        by_name = {base.skeleton.target(key).name: key for key in keys}
        found = {}
        for fqn, weight in base.weights.items():
            key = by_name.get(f"{fqn}.weight")
            if key is None or source.spec(key).shape != weight.shape:
                what = "lacks it" if key is None else f"has it as {list(source.spec(key).shape)}"
                raise ValueError(f"{source.path}: the base has {fqn} {list(weight.shape)}, the dense model {what}.")
            found[fqn] = (source, key)
        yield found
    finally:
        source.close()
