"""Moving to and from other libraries' optimizer checkpoints.

Reading needs nothing: `optimizer.load_state_dict` takes our own state dicts, torch's, torchao's and bitsandbytes' as
they are. Only a *file* with torchao's tensor subclasses needs `read_checkpoint`, where torchao is not installed.

    optimizer.load_state_dict(read_checkpoint("optimizer.pt"))   # torchao's classes replaced by stand-ins
    torch.optim.AdamW(...).load_state_dict(to_torch(optimizer))
    torchao.optim.AdamW8bit(...).load_state_dict(to_torchao(optimizer))

What torchao cannot say is written dequantized: it quantizes a state only from 4,096 values on, and only whole blocks.
"""

from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from halfbyte.optim.adamw import AdamW
from halfbyte.optim.formats import StateFormat, codebook
from halfbyte.optim.saving import group_format
from halfbyte.optim.sharding import is_dtensor, local_region, to_dtensor
from halfbyte.optim.state import moment_names, moment_values

TORCHAO_CLASSES = {
    "OptimState8bit": "subclass_8bit",
    "OptimState4bit": "subclass_4bit",
    "OptimStateFp8": "subclass_fp8",
}
TORCHAO_MODULES = ("torchao.optim", "torchao.prototype.low_bit_optim")  # the second before 0.11
TORCHAO_LEAST = 4096
OWN_OPTIONS = (
    "block_size",
    "min_quant_numel",
    "bf16_stochastic_round",
    "seed",
    "offload_states",
    "state_format",
    "state_version",
)


class TorchaoState(Tensor):
    """A stand-in for torchao's optimizer state tensors: its size, and `codes`, `scale`, ... as attributes."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{func} on a torchao state that was read without torchao; load it into an optimizer first.")


def read_checkpoint(file: str | Path | BinaryIO, map_location: Any = "cpu") -> Any:
    """`torch.load(weights_only=True)` that also knows torchao's optimizer states, without importing torchao."""
    known: list[Any] = [
        (TorchaoState, f"{module}.{part}.{name}")
        for module in TORCHAO_MODULES
        for name, part in TORCHAO_CLASSES.items()
    ]
    with torch.serialization.safe_globals(known):
        return torch.load(file, map_location=map_location, weights_only=True)


def to_torch(optimizer: AdamW) -> dict[str, Any]:
    """A state dict for `torch.optim.AdamW` (or Adam): fp32 states, 8 bytes a parameter; DTensors stay DTensors."""

    def export(param: Tensor, state: dict[str, Tensor], fmt: StateFormat) -> dict[str, Any]:
        shape, _ = local_region(param)
        result = {"step": state["step"].clone()}
        for name in moment_names("max_exp_avg_sq" in state):
            values = moment_values(state, name, fmt, param.numel() if not is_dtensor(param) else _numel(shape))
            values = values.view(shape).clone()
            result[name] = to_dtensor(values, param, tuple(param.shape)) if is_dtensor(param) else values
        return result

    groups = [
        {key: value for key, value in group.items() if key not in OWN_OPTIONS}
        | {"decoupled_weight_decay": optimizer.decoupled_weight_decay}
        for group in optimizer.param_groups
    ]
    return _pack(optimizer, groups, export)


def to_torchao(optimizer: AdamW) -> dict[str, Any]:
    """A state dict for torchao's optimizer of the same name and block size; needs torchao, and unsharded parameters."""
    try:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8
    except ImportError as error:
        raise RuntimeError(
            "to_torchao builds torchao's tensors, but torchao is not installed. Install it with: pip install torchao"
        ) from error

    def quantized(param: Tensor, codes: Tensor, scale: Tensor, fmt: StateFormat, signed: bool) -> Tensor:
        shape = tuple(param.shape)
        if fmt.name == "fp8":
            return OptimStateFp8(codes.view(torch.float8_e4m3fn).view(shape).clone(), scale.clone())
        qmap = codebook(fmt.name, signed).to(codes.device)
        if fmt.name == "4bit":
            return OptimState4bit(codes.clone(), scale.clone(), qmap, signed, shape)
        return OptimState8bit(codes.view(shape).clone(), scale.clone(), qmap, signed)

    def export(param: Tensor, state: dict[str, Tensor], fmt: StateFormat) -> dict[str, Any]:
        if is_dtensor(param):
            raise ValueError(
                "to_torchao takes unsharded parameters: gather the states first (get_optimizer_state_dict)."
            )
        result: dict[str, Any] = {"step": state["step"].cpu().clone()}
        whole_blocks = param.numel() >= TORCHAO_LEAST and param.numel() % fmt.block_size == 0
        for name in moment_names("max_exp_avg_sq" in state):
            if name + "_scale" in state and whole_blocks:
                result[name] = quantized(param, state[name], state[name + "_scale"], fmt, name == "exp_avg")
            else:
                result[name] = moment_values(state, name, fmt, param.numel()).view(param.shape).clone()
        return result

    kept = ("betas", "eps", "weight_decay", "amsgrad", "initial_lr", "params")
    groups = [
        {key: value for key, value in group.items() if key in kept}
        | {"lr": torch.as_tensor(group["lr"], dtype=torch.float32)}
        for group in optimizer.param_groups
    ]
    return _pack(optimizer, groups, export)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _pack(optimizer: AdamW, groups: list[dict[str, Any]], export: Any) -> dict[str, Any]:
    """A state dict of these groups, with `export(param, state, format)` for every parameter that has a state."""
    index: dict[Tensor, int] = {}
    states = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            index.setdefault(param, len(index))
            if optimizer.own_state.get(param):
                states[index[param]] = export(param, optimizer.own_state[param], group_format(group))
    for group in groups:
        group["params"] = [index[param] for param in group["params"]]
    return {"state": states, "param_groups": groups}
