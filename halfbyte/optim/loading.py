"""Loading a state dict: validate, convert where it differs, cast nothing, and say what was converted."""

import math
import warnings
from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from halfbyte.optim.checks import check_complete, check_options
from halfbyte.optim.foreign import bitsandbytes_values, holds_codes, source_of, torchao_moments
from halfbyte.optim.formats import StateFormat
from halfbyte.optim.layout import import_moment, whole_values
from halfbyte.optim.offload import to_host
from halfbyte.optim.saving import group_format
from halfbyte.optim.sharding import is_dtensor, local_region, local_tensor, own_slice
from halfbyte.optim.state import is_quantized, moment_from_values
from halfbyte.optim.state_ops import dequantize

KEPT = ("block_size", "min_quant_numel", "offload_states", "state_format", "state_version")
"""What a state dict does not change: how this optimizer stores its states was chosen when it was built."""
FOREIGN = ("decoupled_weight_decay", "alpha", "t_alpha", "t_beta3", "is_paged")
"""Options of torch's and bitsandbytes' groups that mean nothing here."""


def load_groups(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's param groups with the saved hyper-parameters. Raises ValueError where groups do not match."""
    groups = optimizer.param_groups
    counts = [len(group["params"]) for group in groups]
    saved_counts = [len(group["params"]) for group in saved_groups]
    if counts != saved_counts:
        raise ValueError(
            f"the state dict has param groups of {saved_counts} parameters, this optimizer of {counts}. Build the "
            "optimizer over the same groups as the one that was saved."
        )
    return [_merge_group(group, saved) for group, saved in zip(groups, saved_groups, strict=True)]


def _merge_group(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    if saved.get("state_version", 1) > group["state_version"]:
        raise ValueError(
            f"the state dict has state_version {saved['state_version']}, this version of halfbyte reads up to "
            f"{group['state_version']}. Update halfbyte."
        )
    new = {key: deepcopy(value) for key, value in saved.items() if key not in (*KEPT, *FOREIGN, "params")}
    new = {**group, **new}
    new["betas"], new["lr"] = tuple(new["betas"]), float(new["lr"])
    check_options(new)
    return new


def load_states(optimizer: Any, state_dict: dict[str, Any]) -> dict[Any, Any]:
    """New states of the optimizer's parameters. Warns once if anything was converted."""
    state: dict[Any, Any] = defaultdict(dict)
    saved_states = dict(state_dict["state"])
    changes: set[str] = set()
    for group, saved_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        saved_format = group_format(saved_group) if "state_format" in saved_group else None
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            saved = saved_states.pop(key, None)
            if saved:
                loaded = load_state(param, saved, saved_format, group, changes)
                state[param] = to_host(loaded) if group["offload_states"] else loaded
    state.update(saved_states)  # what belongs to no parameter is kept as it is, as torch does
    if changes:
        warnings.warn(f"optimizer states were converted on load: {'; '.join(sorted(changes))}.", stacklevel=3)
    return state


def load_state(
    param: Tensor,
    saved: dict[str, Any],
    saved_format: StateFormat | None,
    group: dict[str, Any],
    changes: set[str],
) -> dict[str, Tensor]:
    """One parameter's state from a saved one; notes in `changes` what could not be kept as it was."""
    try:
        state = _read_state(param, saved, saved_format, group, changes)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"the saved state of a parameter of shape {list(param.shape)} is not complete (no {error}); it holds "
            f"{', '.join(map(str, saved)) or 'nothing'}. Load another checkpoint, one of Adam or AdamW."
        ) from error
    check_complete(param.shape, state)
    return state


def _read_state(
    param: Tensor,
    saved: dict[str, Any],
    saved_format: StateFormat | None,
    group: dict[str, Any],
    changes: set[str],
) -> dict[str, Tensor]:
    device = local_tensor(param).device
    saved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in saved.items()}
    fmt = group_format(group) if is_quantized(param, group["min_quant_numel"]) else None
    step = torch.as_tensor(local_tensor(saved["step"]), dtype=torch.float32).reshape(()).to(device, copy=True)
    state: dict[str, Tensor] = {"step": step}
    source = source_of(saved)
    if source == "halfbyte":
        if saved_format is None:
            raise ValueError("the state dict has quantized states, but its param group no state_format. It is damaged.")
        for name in _moments(saved):
            state |= _from_ours(param, saved, name, saved_format, fmt, changes)
    elif source == "torchao":
        for name, (codes, scale, found) in torchao_moments(saved).items():
            state |= _from_torchao(param, codes, scale, name, found, fmt, changes, tuple(saved[name].shape))
    else:
        values = bitsandbytes_values(saved) if source == "bitsandbytes" else {n: saved[n] for n in _moments(saved)}
        if fmt is not None or source == "bitsandbytes" and holds_codes(saved):
            changes.add(f"{source} to {_describe(fmt)}")
        for name, value in values.items():
            state |= _from_values(param, value, name, fmt)
    return state


def _describe(fmt: StateFormat | None) -> str:
    return f"{fmt.name} blocks of {fmt.block_size}" if fmt else "fp32"


def _from_torchao(
    param: Tensor,
    codes: Tensor,
    scale: Tensor,
    name: str,
    found: StateFormat,
    fmt: StateFormat | None,
    changes: set[str],
    shape: tuple[int, ...],
) -> dict[str, Tensor]:
    """A moment from torchao's flat codes and scales: as they are where format and block size agree."""
    if fmt == found and not is_dtensor(param) and shape == tuple(param.shape):
        return {name: codes.clone(), name + "_scale": scale.clone()}
    changes.add(f"torchao {_describe(found)} to {_describe(fmt)}")
    values = dequantize(codes, scale, found, math.prod(shape), signed=name == "exp_avg")
    return _from_values(param, values.view(shape), name, fmt)


def _moments(saved: dict[str, Any]) -> list[str]:
    return [name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if name in saved]


def _from_ours(
    param: Tensor,
    saved: dict[str, Any],
    name: str,
    saved_format: StateFormat,
    fmt: StateFormat | None,
    changes: set[str],
) -> dict[str, Tensor]:
    codes, scales, signed = saved[name], saved[name + "_scale"], name == "exp_avg"
    if fmt is None:
        changes.add(f"{_describe(saved_format)} to fp32")
        values = whole_values(param, codes, scales, saved_format, signed=signed)
        return _from_values(param, values, name, None)
    new, scale, exact = import_moment(param, codes, scales, saved_format, fmt, signed=signed)
    if not exact and saved_format != fmt:
        changes.add(f"{saved_format.name} blocks of {saved_format.block_size} to {fmt.name} blocks of {fmt.block_size}")
    elif not exact:
        changes.add(f"{fmt.name} blocks that another mesh had cut differently, quantized anew")
    return {name: new, name + "_scale": scale}


def _from_values(param: Any, values: Any, name: str, fmt: StateFormat | None) -> dict[str, Tensor]:
    """A moment from fp32 values: whole (plain) or sharded as the parameter (DTensor)."""
    if tuple(values.shape) != tuple(param.shape):
        raise ValueError(
            f"{name} of shape {list(values.shape)} does not fit a parameter of shape {list(param.shape)}. Is this the "
            "state of another model? Load one saved from this model."
        )
    if not values.is_floating_point():
        raise ValueError(
            f"{name} holds {values.dtype} but no {name}_scale lies beside it: codes without their scales. The state "
            "dict is damaged; load another checkpoint."
        )
    if is_dtensor(values):
        if values.placements != param.placements:
            values = values.redistribute(param.device_mesh, param.placements)
        local = values.to_local()
    else:
        local = own_slice(values, param) if is_dtensor(param) else values
    return moment_from_values(local.float(), fmt, name, local_region(param)[0])
