"""Whole trainable parameters from an engine that shards them, checked before anything is written.

Under ZeRO-3 a parameter that is not gathered looks like an empty tensor, and under FSDP2 like a DTensor; written as
they are, they give an adapter file that loads without complaint and holds nothing. So: gather, compare shapes with
the layers, refuse otherwise.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfbyte.parallel.agree import together

SAVE_TIMEOUT_S = 600.0


@torch.no_grad()
def gather_trainable(model: nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter, whole, on the CPU, by name. Call it on all ranks; all get it.

    model   plain, under DDP, sharded by FSDP2, or partitioned by ZeRO-3 (the engine's module).
    raises  RuntimeError naming the layer when an adapter factor does not have the shape its layer asks for.
    """
    whole = {
        name.removeprefix("module."): _whole(parameter).cpu()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    check_factors(model, whole)
    return whole


def save_adapter(model: Any, folder: str | Path) -> None:
    """Write a PeftModel's adapter as PEFT does, from gathered parameters, by rank zero; all ranks agree or all raise.

    model   the PeftModel inside the engine (`engine.module` for DDP and DeepSpeed).
    """
    with together(f"Saving the adapter to {folder}", timeout=SAVE_TIMEOUT_S):
        whole = gather_trainable(model)
        if not dist.is_initialized() or dist.get_rank() == 0:
            model.save_pretrained(str(folder), state_dict=whole)


def check_factors(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """RuntimeError unless each lora_A is [r, in] and each lora_B [out, r] of its layer, and nothing is empty."""
    for fqn, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        fqn, base = fqn.removeprefix("module."), module.base_layer
        for adapter, r in getattr(module, "r", {}).items():
            for factor, shape in (("lora_A", (r, base.in_features)), ("lora_B", (base.out_features, r))):
                found = whole.get(f"{fqn}.{factor}.{adapter}.weight")
                if found is not None and tuple(found.shape) != shape:
                    raise RuntimeError(
                        f"{fqn}.{factor}: gathered as {list(found.shape)}, expected {list(shape)}; nothing was "
                        "written. Save from the engine's own module (engine.module), on all ranks at once."
                    )
    empty = [name for name, tensor in whole.items() if tensor.numel() == 0]
    if empty:
        raise RuntimeError(f"{empty[0]} was gathered as an empty tensor; nothing was written.")


def _whole(parameter: nn.Parameter) -> Tensor:
    if hasattr(parameter, "full_tensor"):  # a DTensor
        return parameter.full_tensor().clone()
    if hasattr(parameter, "ds_id"):  # partitioned by ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()
