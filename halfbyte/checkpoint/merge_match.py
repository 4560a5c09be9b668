"""Does an adapter fit a base: every layer found, none of a kind that cannot be merged, tied parameters told apart."""

import torch

from halfbyte.checkpoint.adapter import Adapter
from halfbyte.checkpoint.base import Base


def check_targets(base: Base, adapter: Adapter) -> None:
    """ValueError for a layer or parameter of the adapter that the base does not have."""
    parameters = set(base.dense) | set(base.fp8) | base.skeleton.tied
    known = set(base.weights) | {layer_of(name) for name in parameters if name.endswith(".weight")}
    lost = [layer for layer in adapter.layers if layer not in known]
    lost += [name for name in adapter.modules if name not in parameters]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ValueError(
            f"{adapter.folder}: changes {lost[0]}{more}, which {base.folder} does not have. Is it another base's? Use "
            "the base it was trained on."
        )


def check_fp8(base: Base, adapter: Adapter, to: str) -> None:
    """ValueError for an adapter on an FP8 layer that is to stay FP8."""
    for name in base.fp8:
        if to == "nvfp4" and layer_of(name) in adapter.layers:
            raise ValueError(
                f"{adapter.folder}: changes {layer_of(name)}, which is FP8 in {base.folder}; merging writes NVFP4 or a "
                "dense dtype. Use --to bf16."
            )


def untied_outputs(base: Base, adapter: Adapter) -> dict[str, str]:
    """Parameter that must be written beside the one it is tied to, because the adapter changes only one of the two.

    In the running model, PEFT's layer over one of two tied modules leaves the other as it was; so must the merged file.
    """
    untied = {}
    for copy, original in base.skeleton.model.all_tied_weights_keys.items():
        if copy in base.dense or original not in base.dense:
            continue
        if any(layer_of(name) in adapter.layers for name in (copy, original)) or replaced_apart(
            adapter, copy, original
        ):
            untied[copy] = original
    return untied


def replaced_apart(adapter: Adapter, copy: str, original: str) -> bool:
    """True when the adapter carries a new value for one of two tied parameters, or two that differ."""
    if adapter.config.get("ensure_weight_tying"):
        return False
    there = [name for name in (copy, original) if name in adapter.modules]
    return len(there) == 1 or (len(there) == 2 and not torch.equal(*(adapter.module(name) for name in there)))


def layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
