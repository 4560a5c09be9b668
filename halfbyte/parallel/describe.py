"""What a rank says about its model before training starts, and how two such descriptions differ.

A description is metadata only (no bytes are read), so a rank whose model is on the meta device describes the same
model as one that has loaded it. Values are compared later, by digest.
"""

from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.nvfp4.linear import COMPONENTS, NVFP4Linear, component_shapes

Description = dict[str, dict[str, Any]]  # fully qualified name of a layer or tensor -> field -> JSON value
MAX_LISTED = 5


def describe(model: nn.Module) -> Description:
    """Every NVFP4 layer as one entry, every other parameter and buffer as another, in the model's order.

    raises  ValueError when a base component could be trained, or is not what the format says.
    """
    layers = nvfp4_modules(model)
    entries: Description = {fqn: _layer_entry(fqn, layer) for fqn, layer in layers.items()}
    components = {f"{fqn}.{name}" for fqn in layers for name in COMPONENTS}
    first_names: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        if name not in components:
            entries[name] = _tensor_entry(name, tensor)
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            entries[name] = {"tied to": first}
    return entries


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, non-persistent ones included; a tied tensor under each of its names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def differences(descriptions: list[Description]) -> list[str]:
    """One sentence per difference between a rank and rank zero: rank, layer, found, expected."""
    expected = descriptions[0]
    lines = []
    for rank, found in enumerate(descriptions[1:], start=1):
        for name in expected | found:
            if name not in found:
                lines.append(f"rank {rank} lacks {name}, which rank 0 has ({_short(expected[name])})")
            elif name not in expected:
                lines.append(f"rank {rank} has {name} ({_short(found[name])}), which rank 0 lacks")
            else:
                lines += _field_differences(rank, name, found[name], expected[name])
    return lines


def differences_error(lines: list[str]) -> ValueError:
    """The error for a non-empty list of differences."""
    more = f"; and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return ValueError(
        f"The ranks do not hold the same model: {'; '.join(lines[:MAX_LISTED])}{more}. "
        "Load the same checkpoint with the same arguments (dtype, adapter, versions) on every rank."
    )


def _field_differences(rank: int, name: str, found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"rank {rank}, {name}: {field} is {found.get(field)}, expected {expected.get(field)} as on rank 0"
        for field in expected | found
        if found.get(field) != expected.get(field)
    ]


def _layer_entry(fqn: str, layer: NVFP4Linear) -> dict[str, Any]:
    for name, shape in component_shapes(*layer.held_shape).items():
        _check_component(f"{fqn}.{name}", getattr(layer, name), shape)
    return {
        "layer": type(layer).__name__,
        "shape": list(layer.held_shape),
        "dtype": _dtype(layer.dtype),
        "block size": BLOCK_SIZE,
        "activation": repr(layer.activation),
        "bias": layer.bias is not None,
    }


def _check_component(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient, but the NVFP4 base is frozen. Train an adapter beside it.")
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {_dtype(tensor.dtype)} {list(tensor.shape)}, expected uint8 {list(shape)}. "
            "Something has cast or reshaped the packed base; load the checkpoint again."
        )


def _tensor_entry(name: str, tensor: Tensor) -> dict[str, Any]:
    if type(tensor.data) is not Tensor:
        raise ValueError(
            f"{name} is a {type(tensor.data).__name__}, expected an ordinary tensor. "
            "Load a quantized checkpoint with halfbyte.load_model; wrap a sharded model with its own engine."
        )
    return {"shape": list(tensor.shape), "dtype": _dtype(tensor.dtype), "trainable": tensor.requires_grad}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(entry: dict[str, Any]) -> str:
    return ", ".join(f"{field} {value}" for field, value in entry.items())
