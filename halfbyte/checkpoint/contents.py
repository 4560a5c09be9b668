"""What the keys of an NVFP4 folder are: 4-bit and FP8 weights, extras that no parameter is made of, the dense rest.

A key that belongs to none of these is refused: a weight in a dtype that is neither (int8, say) would be cast without a
word, and what changes a layer's function must not be left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.detect import check_one_format
from halfbyte.checkpoint.formats.base import Format, Rename, StoredWeight, matches, same_name
from halfbyte.checkpoint.shards import Shards

# Scales of kv caches and of activations beside dense or FP8 layers: no parameter of the model, kept byte for byte.
AUXILIARY = ("k_scale", "v_scale", "q_scale", "prob_scale", "input_scale", "output_scale", "input_global_scale")
# Tensors beside a weight without which its layer computes something else: AWQ, SVDQuant, activation order, offsets.
FUNCTION_CHANGING = {
    "pre_quant_scale": "AWQ",
    "svdquant_lora_a": "SVDQuant",
    "svdquant_lora_b": "SVDQuant",
    "weight_g_idx": "GPTQ with activation order",
    "weight_zero_point": "an asymmetric quantizer",
}
SHOWN = 3  # names of unknown tensors in a notice


@dataclass(frozen=True)
class Fp8Weight:
    """An E4M3 weight [N, K] with a scale for the tensor or for each row: value = code * scale."""

    key: str
    scale_key: str

    def read(self, shards: Shards, dtype: torch.dtype) -> Tensor:
        """The dense weight."""
        return self.read_rows(shards, dtype, 0, shards.spec(self.key).shape[0])

    def read_rows(self, shards: Shards, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the dense weight."""
        scale = shards.read(self.scale_key).float().reshape(-1, 1)
        codes = shards.read_rows(self.key, start, stop).float()
        return codes.mul_(scale if len(scale) == 1 else scale[start:stop]).to(dtype)


@dataclass(frozen=True)
class Contents:
    """weights: checkpoint's fqn -> stored; fp8: key of the weight -> where its scale is; the rest are keys, in file
    order: auxiliary and unknown ones make no parameter and are written back as they are. contradicted: NVFP4 weights
    that the config says are not quantized; what the file holds is what is read."""

    weights: dict[str, StoredWeight]
    fp8: dict[str, Fp8Weight]
    auxiliary: list[str]
    unknown: list[str]
    dense: list[str]
    contradicted: list[str]

    @property
    def notice(self) -> str | None:
        """For the user, when something is not taken as it is."""
        parts = []
        if self.fp8:
            parts.append(f"{len(self.fp8)} FP8 layers, decoded to dense")
        if self.contradicted:
            parts.append(
                f"{len(self.contradicted)} layers that the config leaves out hold NVFP4 codes and are read as such, "
                f"the first {self.contradicted[0]}"
            )
        if self.auxiliary:
            parts.append(f"{len(self.auxiliary)} scales for serving engines, not used")
        if self.unknown:
            names = ", ".join(self.unknown[:SHOWN]) + (", ..." if len(self.unknown) > SHOWN else "")
            parts.append(f"{len(self.unknown)} tensors that the model of the config does not know, not used ({names})")
        return "; ".join(parts) or None


def read_contents(
    shards: Shards,
    format: Format,
    config: Mapping[str, Any],
    rename: Rename = same_name,
    is_unknown: Callable[[str], bool] = lambda key: False,
) -> Contents:
    """Sort every key of the folder.

    rename      the checkpoint's name of a weight -> the model's.
    is_unknown  True for a key that the model can do without.
    raises      ValueError for a weight that is damaged, in a dtype or shape that is not read, or FP8 without a usable
                scale, and for tensors that change what a layer computes.
    """
    check_one_format(shards, format)
    weights = format.find(shards, config, rename)
    left = set(shards) - {key for stored in weights.values() for key in stored.keys.values()}
    fp8 = {key: _fp8(shards, key) for key in sorted(left) if _is_fp8(shards, key)}
    left -= fp8.keys() | {weight.scale_key for weight in fp8.values()}
    for key in sorted(left):
        _check_rest(shards, key)
    auxiliary = {key for key in left if key.rpartition(".")[2] in AUXILIARY}
    unknown = {key for key in left - auxiliary if is_unknown(key)}

    def in_order(keys: set[str]) -> list[str]:
        return [key for key in shards if key in keys]

    left_out = format.left_out(shards, config)
    contradicted = [fqn for fqn in weights if any(matches(fqn, pattern) for pattern in left_out)]
    dense = in_order(left - auxiliary - unknown)
    return Contents(weights, fp8, in_order(auxiliary), in_order(unknown), dense, contradicted)


def _is_fp8(shards: Shards, key: str) -> bool:
    spec = shards.spec(key)
    return spec.dtype == torch.float8_e4m3fn and len(spec.shape) == 2 and key.endswith(".weight")


def _fp8(shards: Shards, key: str) -> Fp8Weight:
    scale_key = f"{key}_scale"
    rows = shards.spec(key).shape[0]
    found = shards.spec(scale_key).shape if scale_key in shards else None
    if found not in ((), (1,), (rows,), (rows, 1)):
        where = "is in no file" if found is None else f"is {list(found)}"
        raise ValueError(
            f"{shards.path_of(key)}: {key} is FP8, but {scale_key} {where}, expected [] or [{rows}, 1]. Fetch it "
            "again, or quantize the dense original (halfbyte quantize)."
        )
    return Fp8Weight(key, scale_key)


def _check_rest(shards: Shards, key: str) -> None:
    """ValueError for a key that is no NVFP4 or FP8 weight, and would not be right as a dense one."""
    spec, leaf = shards.spec(key), key.rpartition(".")[2]
    if leaf in FUNCTION_CHANGING:
        raise ValueError(
            f"{shards.path_of(key)}: {key} belongs to {FUNCTION_CHANGING[leaf]}, whose layers compute more than an "
            "NVFP4 product; halfbyte does not read them. Quantize the dense original instead (halfbyte quantize)."
        )
    packed = spec.dtype.itemsize == 1 and spec.dtype != torch.bool
    if packed and len(spec.shape) > 2:
        raise ValueError(
            f"{shards.path_of(key)}: {key} is {spec}: experts stacked into one tensor, which halfbyte does not read. "
            "Expected one linear per expert. Quantize the dense original instead (halfbyte quantize)."
        )
    if leaf in ("weight", "bias") and (packed or not spec.dtype.is_floating_point):
        raise ValueError(
            f"{shards.path_of(key)}: {key} is {spec}, expected NVFP4 codes of the folder's own format, FP8 (E4M3), or "
            "a dense dtype. Quantize the dense original instead (halfbyte quantize)."
        )
