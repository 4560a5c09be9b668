"""The state dict of an optimizer: torch's own shape of dict, holding plain tensors and numbers only.

    {"state": {index: {"step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"[, "max_exp_avg_sq", ...]}},
     "param_groups": [{"lr", ..., "block_size", "min_quant_numel", "state_format", "state_version", "params": [index]}]}

Shapes: `halfbyte.optim.layout`. States that are not quantized are fp32 of the parameter's shape and have no scale.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.layout import export_moment
from halfbyte.optim.sharding import is_dtensor, to_dtensor
from halfbyte.optim.state import moment_names


def group_format(group: dict[str, Any]) -> StateFormat:
    """The state format that a param group names."""
    return FORMATS[group["state_format"]].with_block_size(group["block_size"])


def export_state(param: Tensor, state: dict[str, Tensor], fmt: StateFormat) -> dict[str, Tensor]:
    """One parameter's state in the shapes of a state dict: tensors of its own, over memory that may be the state's."""
    result = {"step": state["step"].detach()}
    for name in moment_names("max_exp_avg_sq" in state):
        if name + "_scale" in state:
            codes, scale = state[name], state[name + "_scale"]
            exported = export_moment(param, codes, scale, fmt, signed=name == "exp_avg")
            result[name], result[name + "_scale"] = exported
        else:
            value = state[name].detach()
            result[name] = to_dtensor(value, param, tuple(param.shape)) if is_dtensor(param) else value
    return result


@torch.no_grad()
def pack_state_dict(optimizer: Any) -> dict[str, Any]:
    """`Optimizer.state_dict` with exported states; parameters are numbered over the groups."""
    index: dict[Tensor, int] = {}
    groups, states = [], {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            index.setdefault(param, len(index))
            if optimizer.own_state.get(param):
                states[index[param]] = export_state(param, optimizer.own_state[param], group_format(group))
        groups.append(
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [index[param] for param in group["params"]]}
        )
    known = {param: index[param] for param in index}
    foreign = {key: value for key, value in optimizer.own_state.items() if key not in known}
    return {"state": states | foreign, "param_groups": groups}
