"""What an optimizer refuses, in a sentence each."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.sharding import is_dtensor


def check_options(group: dict[str, Any]) -> None:
    """Hyper-parameters of a param group. Raises ValueError naming the first that is wrong."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{name} is a tensor of shape {list(value.shape)}, but must hold one value.")
        if not is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, but must be a finite number >= 0.")
    betas = group["betas"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {group['betas']}, but must be two numbers in [0, 1), e.g. (0.9, 0.999).")
    least = group["min_quant_numel"]
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise ValueError(f"min_quant_numel is {least!r}, but counts the values of a parameter: give an integer >= 0.")
    if group["differentiable"]:
        raise ValueError("differentiable=True is not supported: a quantized state has no gradient. Use torch.optim.")
    if not isinstance(group["seed"], int):
        raise ValueError(f"seed is {group['seed']!r}, but must be an integer.")


def is_number(value: Any) -> bool:
    """A number, or a tensor that holds one; True and False are none."""
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def check_block_size(param: Tensor, state: dict[str, Tensor], fmt: StateFormat) -> None:
    """Raises ValueError when the param group's block_size is no longer the one that a state was made with.

    state   in the form that the step works on: flat codes.
    """
    numel, num_blocks = param.numel(), state["exp_avg_scale"].numel()
    if state["exp_avg"].dim() == 1 and state["exp_avg"].numel() == fmt.num_bytes(numel):
        raise ValueError(
            f"block_size is {fmt.block_size}, but the state of a parameter of shape {list(param.shape)} has "
            f"{num_blocks} scales, not {fmt.num_blocks(numel)}: it was made with another. Set the old one again; to "
            "change it, make a new optimizer and load this one's state_dict, which converts."
        )


def check_param(param: Tensor) -> None:
    """A parameter's kind. Raises ValueError for what the step could not do right."""
    if param.is_complex():
        raise ValueError(
            f"a parameter of shape {list(param.shape)} is {param.dtype}; its states cannot be quantized. Pass "
            "torch.view_as_real(param), or put it into its own torch.optim.AdamW."
        )
    if param.requires_grad and param.dtype.itemsize == 1:
        raise ValueError(
            f"a trainable parameter of shape {list(param.shape)} is {param.dtype}; the step writes fp32, bf16, fp16 "
            "and fp64 parameters only. Freeze it (requires_grad_(False)), or cast it."
        )
    if param.requires_grad and is_wrapper(param):
        raise ValueError(
            f"a trainable parameter of shape {list(param.shape)} is a {type(param).__name__}, which keeps its values "
            "in other tensors; the step writes plain tensors and DTensors. Freeze it, or put it into its own "
            "torch.optim.AdamW."
        )
    if param.layout != torch.strided:
        raise ValueError(
            f"a parameter of shape {list(param.shape)} is {param.layout}; only dense ones are supported. Make it dense "
            "(to_dense())."
        )
    if getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False):
        raise ValueError(
            "the parameters belong to FullyShardedDataParallel (FSDP1), whose optim_state_dict cannot hold quantized "
            "states, so a checkpoint would fail at the end of the run. Use torch.distributed.fsdp.fully_shard (FSDP2), "
            "or torch.optim.AdamW."
        )


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that keeps its values in other tensors, DTensor aside: it has no memory itself."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor)


def check_grad(param: Tensor, grad: Tensor) -> None:
    """Raises ValueError for a sparse gradient, and for one that keeps its values in other tensors."""
    if is_wrapper(grad):
        raise ValueError(
            f"the gradient of a parameter of shape {list(param.shape)} is a {type(grad).__name__}, which keeps its "
            "values in other tensors. Give a plain tensor or a DTensor (param.grad = ...)."
        )
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of a parameter of shape {list(param.shape)} is {grad.layout}; only dense gradients are "
            "supported. Use nn.Embedding(sparse=False), or torch.optim.SparseAdam for that parameter."
        )


def check_complete(shape: Sequence[int], state: dict[str, Any]) -> None:
    """Raises ValueError for a state that lacks a moment, or one moment's scales: the kernels would read address 0."""
    needed = {"step", "exp_avg", "exp_avg_sq"}
    if any(name.endswith("_scale") for name in state):
        needed |= {name + "_scale" for name in (*needed - {"step"}, *({"max_exp_avg_sq"} & state.keys()))}
    if missing := sorted(needed - state.keys()):
        raise ValueError(
            f"the optimizer state of a parameter of shape {list(shape)} has no {', '.join(missing)}; it holds "
            f"{', '.join(map(str, state)) or 'nothing'}. Is it of another optimizer, or incomplete? Load a state of "
            "Adam or AdamW, or start without one."
        )


def check_states(params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], fmt: StateFormat) -> None:
    """That states lie where, and are as large as, the kernels take them to be, who go by addresses alone.

    raises RuntimeError naming the first that does not: after `model.to(device)`, or when a program moved or resized
           states by hand; ValueError where one is missing. Checked when addresses are read, not in every step.
    """
    for param, state in zip(params, states, strict=True):
        check_complete(param.shape, state)
        numel, quantized = param.numel(), "exp_avg_scale" in state
        for name, value in state.items():
            expected = 1 if name == "step" else numel
            if quantized and name != "step":
                expected = fmt.num_blocks(numel) if name.endswith("_scale") else fmt.num_bytes(numel)
            kind = torch.uint8 if quantized and name != "step" and not name.endswith("_scale") else torch.float32
            alike = value.device == param.device and value.numel() == expected and value.dtype == kind
            if not alike or not value.is_contiguous():
                strides = "" if value.is_contiguous() else f" with strides {list(value.stride())}"
                raise RuntimeError(
                    f"the optimizer's {name} of a parameter of shape {list(param.shape)} on {param.device} is "
                    f"{value.dtype} of {value.numel()} values on {value.device}{strides}; expected {kind} of "
                    f"{expected} there, contiguous. Make the optimizer after moving the model, and load states by "
                    "load_state_dict."
                )
