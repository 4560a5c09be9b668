"""What the keys of an NVFP4 folder are: 4-bit weights, FP8 weights, extras of serving engines, and the dense rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.formats.base import Format, Rename, StoredWeight, same_name
from halfbyte.checkpoint.shards import Shards

# Scales of kv caches and of activations beside dense or FP8 layers: no parameter of the model, kept byte for byte.
AUXILIARY = ("k_scale", "v_scale", "q_scale", "prob_scale", "input_scale", "output_scale", "input_global_scale")


@dataclass(frozen=True)
class Fp8Weight:
    """An E4M3 weight [N, K] with a scale for the tensor or for each row: value = code * scale."""

    key: str
    scale_key: str

    def read(self, shards: Shards, dtype: torch.dtype) -> Tensor:
        """The dense weight."""
        scale = shards.read(self.scale_key).float()
        return (shards.read(self.key).float() * scale.reshape(-1, 1)).to(dtype)


@dataclass(frozen=True)
class Contents:
    """weights: checkpoint's fqn -> stored; fp8: key of the weight -> where its scale is; the rest are keys."""

    weights: dict[str, StoredWeight]
    fp8: dict[str, Fp8Weight]
    auxiliary: list[str]
    dense: list[str]

    @property
    def notice(self) -> str | None:
        """For the user, when something is not taken as it is."""
        parts = []
        if self.fp8:
            parts.append(f"{len(self.fp8)} FP8 layers, decoded to dense")
        if self.auxiliary:
            parts.append(f"{len(self.auxiliary)} scales for serving engines, not used")
        return "; ".join(parts) or None


def read_contents(shards: Shards, format: Format, config: Mapping[str, Any], rename: Rename = same_name) -> Contents:
    """Sort every key of the folder. ValueError for a weight that is damaged, or FP8 without a usable scale."""
    weights = format.find(shards, config, rename)
    left = set(shards) - {key for stored in weights.values() for key in stored.keys.values()}
    fp8 = {key: _fp8(shards, key) for key in left if shards.spec(key).dtype == torch.float8_e4m3fn and _is_weight(key)}
    left -= fp8.keys() | {weight.scale_key for weight in fp8.values()}
    auxiliary = {key for key in left if key.rpartition(".")[2] in AUXILIARY}
    order = list(shards)
    return Contents(
        weights, fp8, [key for key in order if key in auxiliary], [key for key in order if key in left - auxiliary]
    )


def _is_weight(key: str) -> bool:
    return key.endswith(".weight")


def _fp8(shards: Shards, key: str) -> Fp8Weight:
    scale_key = f"{key}_scale"
    rows = shards.spec(key).shape[0]
    found = shards.spec(scale_key).shape if scale_key in shards else None
    if found not in ((), (1,), (rows,), (rows, 1)):
        where = "is in no file" if found is None else f"is {list(found)}"
        raise ValueError(f"{shards.path_of(key)}: {key} is FP8, but {scale_key} {where}, expected [] or [{rows}, 1].")
    return Fp8Weight(key, scale_key)
