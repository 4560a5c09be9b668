"""NVFP4 as transformers writes it through torchao: `<fqn>._weight_qdata` and its neighbours, and a JSON per tensor.

Every shard's safetensors metadata holds `tensor_names` (a JSON list of all logical tensors) and, for each, a JSON with
its type; for an NVFP4 weight also its attributes (torchao/prototype/safetensors/safetensors_utils.py, torchao 0.18).
Keys are written in the library's order and spacing, so that equal weights give equal metadata, byte for byte. Block
scales are swizzled or not, as the JSON says; a missing per-tensor scale means 1.0. Where transformers renames keys
while loading, keys have the hub's names and the metadata the model's: its own `save_pretrained` writes it so.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint.formats.base import (
    Rename,
    StoredWeight,
    check_global_scale,
    check_qdata,
    check_scales,
    check_spec,
    same_name,
)
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.layout import swizzle, swizzled_shape, unswizzle
from halfbyte.nvfp4.linear import ActivationQuant

# torchao's attribute of NVFP4Tensor -> our component, in torchao's own order
COMPONENTS = {
    "per_tensor_scale": "global_scale",
    "act_per_tensor_scale": "act_scale",
    "qdata": "qdata",
    "scale": "scale",
}
QDATA = "._weight_qdata"
WEIGHT_ONLY = "NVFP4WeightOnlyConfig"
DYNAMIC_ACTIVATION = "NVFP4DynamicActivationNVFP4WeightConfig"


class TorchaoFormat:
    """`Format` for torchao's NVFP4 checkpoints."""

    name = "torchao"
    codes_suffix = QDATA

    def find(self, shards: Shards, config: Mapping[str, Any], rename: Rename = same_name) -> dict[str, StoredWeight]:
        names = set(_tensor_names(shards))
        found = {}
        for key in shards:
            if not key.endswith(QDATA):
                continue
            fqn = key.removesuffix(QDATA)
            name = _listed_name(shards, f"{fqn}.weight", rename, names)
            found[fqn] = _stored(shards, fqn, name, _described(shards, name))
        described = {f"{stored.model_fqn}.weight" for stored in found.values()}
        for name in names - described:
            kind = _described(shards, name)["_type"]
            if kind == "NVFP4Tensor":
                raise ValueError(
                    f"{shards.folder}: metadata lists {name}, but its codes (...{QDATA}) are in no file. Fetch it "
                    "again."
                )
            if kind != "Tensor":
                raise ValueError(
                    f"{shards.folder}: {name} is stored as {kind}, expected NVFP4Tensor or Tensor. Quantize the dense "
                    "original instead (halfbyte quantize)."
                )
        return found

    def left_out(self, shards: Shards, config: Mapping[str, Any]) -> list[str]:
        block = config.get("quantization_config") or {}
        return list(block.get("modules_to_not_convert") or ())

    def read(self, shards: Shards, stored: StoredWeight) -> NVFP4Parts:
        qdata = shards.read(stored.keys["qdata"])
        return NVFP4Parts(qdata, self.read_scale(shards, stored), self.read_global_scale(shards, stored))

    def read_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        rows, cols = stored.shape[0], stored.shape[1] // BLOCK_SIZE
        key = stored.keys["scale"]
        scale = shards.read(key)
        if stored.details["is_swizzled_scales"]:
            scale = unswizzle(scale, rows, cols)
        check_scales(shards.path_of(key), key, scale)
        return scale

    def read_global_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        if "global_scale" not in stored.keys:
            return torch.ones((), dtype=torch.float32)
        key = stored.keys["global_scale"]
        global_scale = shards.read(key).reshape(())
        check_global_scale(shards.path_of(key), key, global_scale)
        return global_scale

    def plan(
        self,
        fqn: str,
        model_fqn: str,
        shape: tuple[int, int],
        activation: ActivationQuant | None,
        dtype: torch.dtype,
    ) -> StoredWeight:
        rows, cols = shape
        specs = {
            "global_scale": TensorSpec(torch.float32, ()),
            "qdata": TensorSpec(torch.uint8, (rows, cols // 2)),
            "scale": TensorSpec(torch.float8_e4m3fn, swizzled_shape(rows, cols // BLOCK_SIZE)),
        }
        if activation is not None and activation.scale is not None:
            specs["act_scale"] = TensorSpec(torch.float32, ())
        details = {
            "is_swizzled_scales": True,
            "use_triton_kernel": activation is not None,
            "act_quant_kwargs": _act_quant_kwargs(activation),
            "block_size": BLOCK_SIZE,
            "orig_dtype": {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")},
        }
        attribute = {ours: theirs for theirs, ours in COMPONENTS.items()}
        keys = {component: f"{fqn}._weight_{attribute[component]}" for component in specs}
        return StoredWeight(fqn, model_fqn, shape, keys, specs, activation, details)

    def encode(self, stored: StoredWeight, parts: NVFP4Parts) -> dict[str, Tensor]:
        scale = swizzle(parts.scale) if stored.details["is_swizzled_scales"] else parts.scale
        tensors = {"qdata": parts.qdata, "scale": scale, "global_scale": parts.global_scale}
        if "global_scale" not in stored.keys:
            assert float(tensors.pop("global_scale")) == 1.0, f"{stored.fqn}: this file has no room for a tensor scale"
        if "act_scale" in stored.keys:
            assert stored.activation is not None and stored.activation.scale is not None
            tensors["act_scale"] = torch.tensor(stored.activation.scale, dtype=torch.float32)
        return {stored.keys[c]: tensor.reshape(stored.specs[c].shape) for c, tensor in tensors.items()}

    def file_metadata(self, names: list[str], weights: Mapping[str, StoredWeight]) -> dict[str, str]:
        described = {f"{stored.model_fqn}.weight": _describe(stored) for stored in weights.values()}
        metadata = {name: json.dumps(described.get(name, {"_type": "Tensor"})) for name in names}
        return {**metadata, "tensor_names": json.dumps(names)}

    def declare(
        self, config: Mapping[str, Any], weights: Mapping[str, StoredWeight], dense_linears: list[str]
    ) -> dict[str, Any]:
        activations = {stored.activation is not None for stored in weights.values()}
        if True in activations:
            dynamic = all(stored.activation is None or stored.activation.scale is None for stored in weights.values())
            data = {"use_triton_kernel": True, "use_dynamic_per_tensor_scale": dynamic, "step": None}
            quant_type = {"_type": DYNAMIC_ACTIVATION, "_version": 1, "_data": data}
        else:
            quant_type = {"_type": WEIGHT_ONLY, "_version": 1, "_data": {"use_dynamic_per_tensor_scale": True}}
        block = {
            "quant_method": "torchao",
            "quant_type": {"default": quant_type},
            "modules_to_not_convert": sorted(dense_linears) or None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }
        return {**config, "quantization_config": block}

    def extra_files(self, config: Mapping[str, Any], dense_linears: list[str]) -> dict[str, Any]:
        return {}


def _tensor_names(shards: Shards) -> list[str]:
    try:
        names = json.loads(shards.metadata["tensor_names"])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"tensor_names is {str(names)[:80]}")
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{shards.folder}: its config says torchao, but the safetensors metadata has no readable list tensor_names "
            f"({error!r}). A tool that rewrote the files dropped it; quantize again, or take the original files."
        ) from error
    return names


def _described(shards: Shards, name: str) -> dict[str, Any]:
    try:
        described = json.loads(shards.metadata[name])
        described["_type"]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{shards.folder}: the safetensors metadata lists {name}, but its own entry is missing or unreadable "
            f"({error!r}), expected JSON with _type. Fetch the files again."
        ) from error
    return described


def _listed_name(shards: Shards, name: str, rename: Rename, names: set[str]) -> str:
    """The name under which the metadata lists a weight: transformers writes the model's, beside the hub's keys."""
    for candidate in (name, rename(name)):
        if candidate in names:
            return candidate
    key = name.removesuffix(".weight") + QDATA
    raise ValueError(
        f"{shards.path_of(key)}: {key} is there, but the metadata's tensor_names does not list {name}. Fetch the files "
        "again."
    )


def _stored(shards: Shards, fqn: str, name: str, described: dict[str, Any]) -> StoredWeight:
    """One weight, from its JSON and the headers; complains of whatever does not fit together."""
    if described["_type"] != "NVFP4Tensor":
        raise ValueError(
            f"{shards.folder}: {name} is stored as {described['_type']}, expected NVFP4Tensor. Quantize the dense "
            "original instead (halfbyte quantize)."
        )
    try:
        details = described["_data"]
        attributes = list(described["_tensor_data_names"])
        keys = {COMPONENTS[attribute]: f"{fqn}._weight_{attribute}" for attribute in attributes}
        swizzled = bool(details.setdefault("is_swizzled_scales", False))
        details.setdefault("act_quant_kwargs", None)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{shards.folder}: metadata of {name}: {error!r} missing or unknown in {described}. Fetch it again, or "
            "quantize the dense original."
        ) from error
    for component in ("qdata", "scale"):
        keys.setdefault(component, f"{fqn}._weight_{component}")
    for key in keys.values():
        if key not in shards:
            raise ValueError(f"{shards.folder}: {key} is in no file, but {name} needs it. Fetch the checkpoint again.")
    specs = {component: shards.spec(key) for component, key in keys.items()}
    shape = _check_specs(shards, keys, specs, swizzled)
    activation = _activation(shards, name, keys, details)
    return StoredWeight(fqn, name.removesuffix(".weight"), shape, keys, specs, activation, details)


def _check_specs(shards: Shards, keys: dict[str, str], specs: dict[str, TensorSpec], swizzled: bool) -> tuple[int, int]:
    path = {component: shards.path_of(key) for component, key in keys.items()}
    rows, cols = check_qdata(path["qdata"], keys["qdata"], specs["qdata"])
    blocks = cols // BLOCK_SIZE
    shape = swizzled_shape(rows, blocks) if swizzled else (rows, blocks)
    check_spec(path["scale"], keys["scale"], specs["scale"], torch.float8_e4m3fn, shape)
    for component in ("global_scale", "act_scale"):
        if component in keys:
            check_spec(path[component], keys[component], specs[component], torch.float32, (), (1,))
    return rows, cols


def _activation(shards: Shards, name: str, keys: dict[str, str], details: Mapping[str, Any]) -> ActivationQuant | None:
    """torchao quantizes the input iff act_quant_kwargs is there; without a scale of its own, by 1.0."""
    if details["act_quant_kwargs"] is None:
        return None
    try:
        dynamic = details["act_quant_kwargs"]["_data"]["use_dynamic_per_tensor_scale"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{shards.folder}: metadata of {name}: act_quant_kwargs lacks {error!r}. Fetch it again, or quantize the "
            "dense original."
        ) from error
    if dynamic:
        return ActivationQuant(scale=None)
    if "act_scale" not in keys:
        return ActivationQuant(scale=1.0)
    value = shards.read(keys["act_scale"])
    check_global_scale(shards.path_of(keys["act_scale"]), keys["act_scale"], value)
    return ActivationQuant(scale=float(value))


def _act_quant_kwargs(activation: ActivationQuant | None) -> dict[str, Any] | None:
    if activation is None:
        return None
    data = {
        "block_size": BLOCK_SIZE,
        "is_swizzled_scales": True,
        "use_triton_kernel": True,
        "use_dynamic_per_tensor_scale": activation.scale is None,
    }
    return {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": data}


def _describe(stored: StoredWeight) -> dict[str, Any]:
    """The JSON of one weight, fields in the order in which torchao writes them."""
    order = ("is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "block_size", "orig_dtype")
    data = {field: stored.details[field] for field in order if field in stored.details}
    attributes = [theirs for theirs, ours in COMPONENTS.items() if ours in stored.keys]
    return {"_type": "NVFP4Tensor", "_data": data, "_tensor_data_names": attributes}
