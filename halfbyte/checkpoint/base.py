"""An NVFP4 base opened for streaming: where each of the model's weights and parameters lies in the files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint.compare import count_unequal_bytes
from halfbyte.checkpoint.contents import Fp8Weight, read_contents
from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.formats.base import Format, StoredWeight
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.source import DenseSource, open_source


@dataclass(frozen=True)
class Base:
    """An opened NVFP4 base, by the model's names.

    weights  fqn -> NVFP4 weight.
    fp8      parameter -> FP8 weight.
    dense    parameter -> key; for what transformers fuses while loading, key -> key.
    scales   keys of scales for serving engines, that no parameter is made of.
    unknown  keys that the model does not know and can do without.
    """

    folder: Path
    config: dict[str, Any]
    format: Format
    shards: Shards
    skeleton: Skeleton
    weights: dict[str, StoredWeight]
    fp8: dict[str, Fp8Weight]
    dense: dict[str, str]
    scales: list[str]
    unknown: list[str]

    @property
    def extras(self) -> list[str]:
        """Keys that no parameter is made of, but for scales of FP8 weights."""
        return [*self.scales, *self.unknown]

    @property
    def kept(self) -> list[str]:
        """Keys that are written back as they are beside NVFP4 weights: extras and scales of FP8 weights."""
        return [*self.extras, *(weight.scale_key for weight in self.fp8.values())]

    @property
    def dtype(self) -> torch.dtype:
        return self.skeleton.dtype

    @property
    def dense_linears(self) -> list[str]:
        """fqns of the model's linear layers that are not NVFP4, tied ones included."""
        return [fqn for fqn in self.skeleton.all_linears if fqn not in self.weights]


@contextmanager
def open_base(path: str | os.PathLike[str]) -> Iterator[Base]:
    """ValueError when the folder holds no NVFP4 weight, or not all that the model of its config needs."""
    folder = local_folder(path)
    config = read_config(folder)
    format = detect(folder, config)
    if format is None:
        raise ValueError(
            f"{folder}: found a dense model, expected an NVFP4 base. Make one with `halfbyte quantize`; PEFT itself "
            "merges into dense models."
        )
    with Shards(folder) as shards:
        skeleton = Skeleton.from_folder(folder)
        contents = read_contents(shards, format, config, lambda key: own_name(skeleton, key), skeleton.can_do_without)
        if not contents.weights:
            raise ValueError(f"{folder}: holds no NVFP4 weight. Make a base that does with `halfbyte quantize`.")
        names = [weight.weight_name for weight in contents.weights.values()]
        skeleton.check_complete([*names, *contents.fp8, *contents.dense], folder)
        weights = {weight.model_fqn: weight for weight in contents.weights.values()}
        fp8 = {own_name(skeleton, key): weight for key, weight in contents.fp8.items()}
        dense = {own_name(skeleton, key): key for key in contents.dense}
        yield Base(folder, config, format, shards, skeleton, weights, fp8, dense, contents.auxiliary, contents.unknown)


def own_name(skeleton: Skeleton, key: str) -> str:
    """The parameter that a key becomes alone; the key itself when it is fused with others."""
    target = skeleton.target(key)
    return key if target.fused else target.name


def tied_copies(base: Base) -> list[str]:
    """Parameters whose bytes are in the files a second time, under the name of what the config ties them to."""
    found = []
    for copy, original in base.skeleton.model.all_tied_weights_keys.items():
        if copy in base.dense and original in base.dense:
            keys = base.dense[copy], base.dense[original]
            same = base.shards.spec(keys[0]) == base.shards.spec(keys[1])
            if same and not count_unequal_bytes(base.shards, keys[0], base.shards, keys[1]):
                found.append(copy)
    return found


@contextmanager
def dense_base(path: str | os.PathLike[str], base: Base) -> Iterator[dict[str, tuple[DenseSource, str]]]:
    """Model's fqn of each NVFP4 layer -> where its dense original is. ValueError when one is missing."""
    source = open_source(path)
    try:
        keys = source.keys()
        by_name = {own_name(base.skeleton, key): key for key in keys}
        found = {}
        for fqn, weight in base.weights.items():
            key = by_name.get(f"{fqn}.weight")
            if key is None or source.spec(key).shape != weight.shape:
                what = "lacks it" if key is None else f"has it as {list(source.spec(key).shape)}"
                raise ValueError(
                    f"{source.path}: the base has {fqn} {list(weight.shape)}, the dense model {what}. Give the dense "
                    "original of this base, or leave --onto out."
                )
            found[fqn] = (source, key)
        yield found
    finally:
        source.close()
