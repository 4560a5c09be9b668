"""What DeepSpeed must be told about a frozen NVFP4 base.

ZeRO-1 and 2 share optimizer states and gradients of the adapter; ZeRO-3 also partitions the packed base, whose
parameters are ordinary uint8 tensors. DeepSpeed casts floating parameters only, so the base's bytes stay as they are.
What it cannot know: that a merge-aware layer reads parameters of its sub-modules without calling them, and that some
of its options would re-encode or lose the base. Those are refused here, before anything is partitioned.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.nvfp4.linear import COMPONENTS
from halfbyte.parallel.agree import CHECK_TIMEOUT_S, world_size
from halfbyte.parallel.synchronize import synchronize
from halfbyte.parallel.zero3 import partition_from_rank_zero

STAGES = (0, 1, 2, 3)
REFUSED = {
    "zero_quantized_weights": "it would quantize the packed codes a second time",
    "zero_quantized_nontrainable_weights": "it would quantize the packed codes a second time",
    "zero_hpz_partition_size": "secondary partitions of a packed base are not tested",
    "mics_shard_size": "MiCS with a packed base is not tested",
}


def prepare_for_deepspeed(
    model: nn.Module, config: str | Path | dict[str, Any], *, timeout: float = CHECK_TIMEOUT_S
) -> dict[str, Any]:
    """Check the config and the ranks, and return the config to hand to `deepspeed.initialize`.

    model    a PeftModel over an NVFP4 base; on ranks above zero it may be on the meta device.
    config   DeepSpeed's own, as a dict or a JSON file.
    returns  the config, with client optimizers allowed (`zero_allow_untested_optimizer`) and kept
             (`zero_force_ds_cpu_optimizer` false) unless it says otherwise.
    raises   ValueError for an option that does not go with a packed base; as `synchronize` for ranks that differ.
    """
    checked = check_config(read_deepspeed_config(config))
    spread(model, checked, dtype_of(checked), timeout=timeout)
    return client_config(checked)


def spread(
    model: nn.Module,
    config: dict[str, Any],
    dtype: torch.dtype | None,
    *,
    device: torch.device | None = None,
    timeout: float = CHECK_TIMEOUT_S,
) -> None:
    """Give every rank rank zero's model, or with stage 3 its part of it; the ranks are compared before and after.

    dtype    what the engine will cast floating parameters to, if to anything.
    device   as for `synchronize`; with stage 3 parts are where DeepSpeed keeps them.
    """
    if stage_of(config) == 3 and world_size() > 1:
        partition_from_rank_zero(model, config, dtype=dtype, timeout=timeout)
    else:
        synchronize(model, device=device, timeout=timeout)
    tell_deepspeed(model, config)


def dtype_of(config: dict[str, Any]) -> torch.dtype | None:
    """What a config tells the engine to cast floating parameters to."""
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(key, {}).get("enabled") is True:
            return dtype
    return None


def tell_deepspeed(model: nn.Module, config: dict[str, Any]) -> None:
    """What the engine cannot know of the layers; before `deepspeed.initialize`."""
    for layer in merge_aware_layers(model).values():
        layer.keep = False  # a kept W' would be an unpartitioned copy of the base on every rank
    if stage_of(config) == 3:
        declare_external_parameters(model)


def client_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config with an optimizer of ours or torch's allowed, and kept as it is under offload."""
    return {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **config}


def read_deepspeed_config(config: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config as a dict. FileNotFoundError, or ValueError for what is not a JSON object."""
    if isinstance(config, dict):
        return config
    if not Path(config).is_file():
        raise FileNotFoundError(f"{config}: no such DeepSpeed config; give the path of a JSON file")
    try:
        values = json.loads(Path(config).read_text())
    except ValueError as error:
        raise ValueError(f"{config}: not readable as JSON ({error}); mend the file") from None
    if not isinstance(values, dict):
        raise ValueError(
            f"{config}: found {type(values).__name__}, expected a JSON object; give DeepSpeed's own config"
        )
    return values


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config itself; ValueError naming the key that does not go with a packed base, and what to write instead."""
    zero = config.get("zero_optimization", {})
    if stage_of(config) not in STAGES:
        raise ValueError(f"zero_optimization.stage is {stage_of(config)}, expected one of {STAGES}")
    for key, reason in REFUSED.items():
        value = zero.get(key)
        if value is True or (value is not None and value > 1):
            raise ValueError(f"zero_optimization.{key}: {reason}; remove it")
    for key in ("offload_param", "offload_optimizer"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", "cpu", None):
            raise ValueError(f"zero_optimization.{key}.device is {device}, which is not tested here; use cpu or none")
    if (zero.get("offload_param") or {}).get("device", "none") == "cpu" and stage_of(config) != 3:
        raise ValueError("zero_optimization.offload_param needs stage 3; set stage to 3, or remove it")
    if config.get("compression_training"):
        raise ValueError("compression_training would change the frozen base; remove it")
    return config


def stage_of(config: dict[str, Any]) -> int:
    """The ZeRO stage that a config asks for."""
    return config.get("zero_optimization", {}).get("stage", 0)


def declare_external_parameters(model: nn.Module) -> None:
    """Tell ZeRO-3 which parameters a merge-aware layer uses besides its own, so that its forward finds them whole."""
    import deepspeed

    for layer in merge_aware_layers(model).values():
        frozen = layer.frozen()
        used = [getattr(frozen, name) for name in COMPONENTS]
        used += [frozen.bias] if frozen.bias is not None else []
        used += [module.weight for factors in (layer.lora_A, layer.lora_B) for module in factors.values()]
        for parameter in used:
            deepspeed.zero.register_external_parameter(layer, parameter)
