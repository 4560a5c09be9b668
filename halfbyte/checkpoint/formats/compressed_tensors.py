"""NVFP4 as compressed-tensors writes it (format "nvfp4-pack-quantized", presets NVFP4 and NVFP4A16); vLLM reads it.

Source: compressed-tensors 0.20, compressors/nvfp4/base.py and quantization/quant_scheme.py. A layer belongs to the
first config group whose targets name it ("Linear", a module's name, or "re:" and a pattern).
"""

import re
from collections.abc import Mapping
from typing import Any

from halfbyte.checkpoint.formats.base import Rename, StoredWeight, same_name
from halfbyte.checkpoint.formats.keyed import KeyedFormat, KeyedLayout
from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.nvfp4.linear import ActivationQuant

FORMAT = "nvfp4-pack-quantized"
LAYOUT = KeyedLayout(
    names={
        "qdata": "weight_packed",
        "scale": "weight_scale",
        "global_scale": "weight_global_scale",
        "act_scale": "input_global_scale",
    },
    scalar_shape=(1,),
    reciprocal=True,
)
ARGUMENTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "group_size": BLOCK_SIZE,
    "strategy": "tensor_group",
    "scale_dtype": "torch.float8_e4m3fn",
}


class CompressedTensorsFormat(KeyedFormat):
    """`Format` for compressed-tensors' NVFP4 checkpoints."""

    name = "compressed-tensors"
    layout = LAYOUT
    codes_suffix = LAYOUT.codes_suffix

    def find(self, shards: Shards, config: Mapping[str, Any], rename: Rename = same_name) -> dict[str, StoredWeight]:
        groups = config_groups(config, shards)

        def activation_of(fqn: str, scale: float | None) -> ActivationQuant | None:
            group = group_of(fqn, groups, rename(f"{fqn}.weight").removesuffix(".weight"))
            inputs = group.get("input_activations")
            if not inputs:
                return None
            check_arguments(inputs, f"{shards.folder}: input_activations of {fqn}")
            if inputs.get("dynamic") is True:
                return ActivationQuant(scale=None)
            if scale is None:
                key = f"{fqn}.{LAYOUT.names['act_scale']}"
                raise ValueError(
                    f"{shards.folder}: {key} is in no file, but the config says W4A4 with calibrated inputs. Fetch it "
                    "again, or set input_activations to null there, for weight-only."
                )
            return ActivationQuant(scale=scale)

        return self.layout.find(shards, rename, activation_of)

    def left_out(self, shards: Shards, config: Mapping[str, Any]) -> list[str]:
        block = config.get("quantization_config") or config.get("compression_config") or {}
        return list(block.get("ignore") or ())

    def declare(
        self, config: Mapping[str, Any], weights: Mapping[str, StoredWeight], dense_linears: list[str]
    ) -> dict[str, Any]:
        inputs = {**ARGUMENTS, "dynamic": "local", "observer": "static_minmax"}
        group = {
            "targets": ["Linear"],
            "weights": {**ARGUMENTS, "dynamic": False},
            "input_activations": inputs if any(w.activation is not None for w in weights.values()) else None,
            "output_activations": None,
            "format": FORMAT,
        }
        block = {
            "config_groups": {"group_0": group},
            "format": FORMAT,
            "global_compression_ratio": None,
            "ignore": sorted(dense_linears),
            "kv_cache_scheme": None,
            "quant_method": self.name,
            "quantization_status": "compressed",
        }
        return {**config, "quantization_config": block}

    def extra_files(self, config: Mapping[str, Any], dense_linears: list[str]) -> dict[str, Any]:
        return {}


def config_groups(config: Mapping[str, Any], shards: Shards) -> list[Mapping[str, Any]]:
    """The groups of the config. ValueError when there are none."""
    block = config.get("quantization_config") or config.get("compression_config") or {}
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(
            f"{shards.folder / 'config.json'}: quantization_config has no config_groups, expected a group a scheme. "
            "Fetch the file again."
        )
    for field in ("transform_config", "sparsity_config"):
        if block.get(field) and block[field].get("format") != "dense":
            raise ValueError(
                f"{shards.folder / 'config.json'}: {field} is set: its layers compute more than an NVFP4 product "
                "(rotations, sparsity), which halfbyte does not read. Quantize the dense original instead (halfbyte "
                "quantize)."
            )
    return list(groups.values())


def group_of(fqn: str, groups: list[Mapping[str, Any]], model_fqn: str) -> Mapping[str, Any]:
    """The NVFP4 group that a layer belongs to: one that names it, else one that targets all linears."""

    def names_it(target: str) -> bool:
        if target.startswith("re:"):
            return any(re.match(target[3:], name) is not None for name in (fqn, model_fqn))
        return target in (fqn, model_fqn)

    fp4 = [group for group in groups if (group.get("weights") or {}).get("num_bits") == 4]
    for matches in (names_it, lambda target: target == "Linear"):
        for group in fp4:
            if any(matches(target) for target in group.get("targets") or ()):
                check_arguments(group["weights"], f"weights of {fqn}")
                return group
    raise ValueError(
        f"{fqn}: its codes are in the file, but no 4-bit group of the config targets it. Add it to a group's targets "
        "in config.json, or fetch that again."
    )


def check_arguments(arguments: Mapping[str, Any], what: str) -> None:
    """ValueError for a scheme that is not NVFP4."""
    for field, expected in (("num_bits", 4), ("type", "float"), ("group_size", BLOCK_SIZE)):
        if arguments.get(field) != expected:
            raise ValueError(
                f"{what}: {field} is {arguments.get(field)}, expected {expected} (NVFP4). Quantize the dense original "
                "instead (halfbyte quantize)."
            )
