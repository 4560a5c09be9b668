"""What Adam remembers of one parameter: a dict of plain local tensors.

The names and shapes are those of the step's contract (kernels/step.py). Memory per parameter: 2.03 bytes (8bit, fp8) or
1.06 (4bit), 8 where the parameter is too small to be quantized, half as much again with amsgrad.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.state_ops import dequantize, quantize

State = dict[str, Tensor]


def moment_names(amsgrad: bool) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")


def is_quantized(param: Tensor, min_quant_numel: int) -> bool:
    """Counts the whole parameter, not the local shard, so that every mesh decides alike.

    A DTensor counts itself whole; a plain tensor that is one rank's part says so by an attribute `whole_numel`.
    """
    return getattr(param, "whole_numel", param.numel()) >= min_quant_numel


def is_steppable(state: dict[str, Any]) -> bool:
    """False for an empty state, and where somebody has set the step to a number."""
    return isinstance(state.get("step"), Tensor)


def new_moment(local: Tensor, fmt: StateFormat | None, name: str) -> State:
    """A zero moment for a local tensor: codes and scale, or (fmt None) an fp32 tensor of its shape."""
    if fmt is None:
        return {name: torch.zeros(local.shape, dtype=torch.float32, device=local.device)}
    codes = torch.zeros(fmt.num_bytes(local.numel()), dtype=torch.uint8, device=local.device)
    scale = torch.zeros(fmt.num_blocks(local.numel()), dtype=torch.float32, device=local.device)
    return {name: codes, name + "_scale": scale}


def new_state(local: Tensor, fmt: StateFormat | None, *, amsgrad: bool) -> State:
    """A fresh state. `step` lies on the parameter's device, so that no step ever waits for the GPU."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=local.device)}
    for name in moment_names(amsgrad):
        state |= new_moment(local, fmt, name)
    return state


def moment_values(state: State, name: str, fmt: StateFormat, numel: int) -> Tensor:
    """A moment as flat fp32 values, whether it is quantized or not."""
    if name + "_scale" not in state:
        return state[name].reshape(-1).float()
    return dequantize(state[name], state[name + "_scale"], fmt, numel, signed=name == "exp_avg")


def moment_from_values(values: Tensor, fmt: StateFormat | None, name: str, shape: Any) -> State:
    """The reverse: a moment from fp32 values of a local shard."""
    if fmt is None:
        return {name: values.reshape(shape).to(torch.float32, copy=True, memory_format=torch.contiguous_format)}
    codes, scale = quantize(values.reshape(-1).float(), fmt, signed=name == "exp_avg")
    return {name: codes, name + "_scale": scale}
