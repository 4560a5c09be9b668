"""NVFP4 as NVIDIA ModelOpt exports it; TensorRT-LLM, vLLM and SGLang read it.

Source: nvidia-modelopt 0.47, torch/export (unified_export_hf.py, quant_utils.py, convert_hf_config.py). Declared in
hf_quant_config.json and, in newer exports, mirrored in config.json. AWQ and SVDQuant variants carry further tensors
(pre_quant_scale, svdquant_lora_a), by which contents.py knows and refuses them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.formats.base import Rename, StoredWeight, same_name
from halfbyte.checkpoint.formats.keyed import KeyedFormat, KeyedLayout
from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.nvfp4.linear import ActivationQuant

QUANT_FILE = "hf_quant_config.json"
LAYOUT = KeyedLayout(
    names={"qdata": "weight", "scale": "weight_scale", "global_scale": "weight_scale_2", "act_scale": "input_scale"},
    scalar_shape=(),
    reciprocal=False,
)
W4A4, W4A16, MIXED = "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"


class ModelOptFormat(KeyedFormat):
    """`Format` for ModelOpt's NVFP4 exports."""

    name = "modelopt"
    layout = LAYOUT
    codes_suffix = LAYOUT.codes_suffix

    def find(self, shards: Shards, config: Mapping[str, Any], rename: Rename = same_name) -> dict[str, StoredWeight]:
        default = check_algorithm(shards, config)
        layers = quantization_of(shards.folder, config).get("quantized_layers")
        own = layers if isinstance(layers, dict) else {}

        def activation_of(fqn: str, scale: float | None) -> ActivationQuant | None:
            algorithm = (own.get(fqn) or {}).get("quant_algo", default)
            return None if algorithm == W4A16 or scale is None else ActivationQuant(scale=scale)

        return self.layout.find(shards, rename, activation_of)

    def left_out(self, shards: Shards, config: Mapping[str, Any]) -> list[str]:
        block = quantization_of(shards.folder, config)
        return list(block.get("exclude_modules") or block.get("ignore") or ())

    def declare(
        self, config: Mapping[str, Any], weights: Mapping[str, StoredWeight], dense_linears: list[str]
    ) -> dict[str, Any]:
        arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
        w4a4 = any(weight.activation is not None for weight in weights.values())
        group = {"weights": arguments, "targets": ["Linear"], **({"input_activations": arguments} if w4a4 else {})}
        block = {
            "config_groups": {"group_0": group},
            "ignore": sorted(dense_linears),
            "quant_algo": W4A4 if w4a4 else W4A16,
            "producer": producer(),
            "quant_method": self.name,
        }
        return {**config, "quantization_config": block}

    def extra_files(self, config: Mapping[str, Any], dense_linears: list[str]) -> dict[str, Any]:
        quantization = {
            "quant_algo": config["quantization_config"]["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": sorted(dense_linears),
        }
        return {QUANT_FILE: {"producer": producer(), "quantization": quantization}}


def producer() -> dict[str, str]:
    """Who wrote the file. Readers of ModelOpt files look for the name "modelopt", not at the version."""
    from halfbyte import __version__

    return {"name": "modelopt", "version": f"halfbyte-{__version__}"}


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What hf_quant_config.json, or config.json, says of the quantization."""
    from halfbyte.checkpoint.detect import read_json

    path = folder / QUANT_FILE
    block = read_json(path).get("quantization") if path.exists() else config.get("quantization_config")
    return block if isinstance(block, dict) else {}


def check_algorithm(shards: Shards, config: Mapping[str, Any]) -> str:
    """The algorithm; ValueError for one whose layers compute something else than NVFP4 weights do."""
    found = quantization_of(shards.folder, config).get("quant_algo")
    if found not in (W4A4, W4A16, MIXED):
        raise ValueError(
            f"{shards.folder}: ModelOpt's quant_algo is {found}, expected {W4A4}, {W4A16} or {MIXED}. Quantize the "
            "dense original instead (halfbyte quantize)."
        )
    return found
