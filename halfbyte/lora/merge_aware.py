"""Training a LoRA adapter for the weight it will be merged into.

An ordinary adapter is trained beside the 4-bit weight and rounded into it afterwards; rounded to nearest, what is small
against its step is lost. Here every forward multiplies with W' = Q(W + s B A), the very bytes that `halfbyte merge`
writes, and the gradient passes straight through Q. docs/merge_aware.md has the formulas, the price, and when not to use
it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from halfbyte.lora.merge import Recipe, Rounding, Scales
from halfbyte.lora.metadata import Quantizer, check_quantizer
from halfbyte.lora.names import base_name
from halfbyte.nvfp4.convert import replace_module
from halfbyte.nvfp4.digest import model_digest, weight_digest
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as PeftLoraLinear

    from halfbyte.lora.merge_aware_layer import MergeAwareLinear

SHOWN = 3  # problems spelled out in an error


def make_merge_aware(
    peft_model: nn.Module,
    *,
    rounding: Rounding = "dither",
    scales: Scales = "keep",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    cache: bool | None = None,
    active: bool = True,
) -> nn.Module:
    """Let every LoRA layer over an NVFP4 weight compute with its merged weight. Changed in place, and returned.

    peft_model  a PeftModel (or a model with injected adapters), before an engine wraps it. Parameters keep identity and
                names. LoRA over a dense layer stays as it is: it merges without rounding to 4 bits.
    rounding, scales, seed   as in `merged_parts`; they are recorded with the adapter, and the merge repeats them.
    dtype       what "nearest" rounds base + delta to before the quantizer; default: each layer's own.
    cache       keep the packed W' from one optimizer step to the next (0.5 bytes a weight), or compute it in each
                forward and backward (no memory). Default: keep it on a CPU.
    active      False: train as plain LoRA until `set_merge_aware(model, True)` (see `start_step`).
    raises      ValueError, before any training, for a setting that is none (a seed that is no integer), and for what a
                merged weight cannot honour: no LoRA over an NVFP4 weight, DoRA and other variants, LoRA biases, trained
                base biases, several active adapters, merged adapters.

    PEFT builds its own layers again when an adapter is added on new targets: call it after.
    """
    from halfbyte.lora.merge_aware_layer import MergeAwareLinear

    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, expected a torch.dtype such as torch.bfloat16, or None")
    check_quantizer(Quantizer(rounding, scales, seed, str(dtype or torch.float32).removeprefix("torch.")))
    layers = lora_layers(peft_model)
    refuse(peft_model, layers)
    for fqn, layer in layers.items():
        base = cast(NVFP4Linear, layer.base_layer)
        recipe = Recipe(base_name(fqn), seed, rounding, scales, dtype or base.dtype)
        replace_module(peft_model, fqn, MergeAwareLinear.from_peft(layer, recipe, cache, active))
    return peft_model


def lora_layers(model: nn.Module) -> dict[str, "PeftLoraLinear"]:
    """PEFT's plain LoRA layers over NVFP4 weights, by fully qualified name."""
    from peft.tuners.lora import Linear as PeftLoraLinear

    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, PeftLoraLinear) and isinstance(module.base_layer, NVFP4Linear)
    }


def merge_aware_layers(model: nn.Module) -> dict[str, "MergeAwareLinear"]:
    """Merge-aware layers by their names in the base model; empty for another model."""
    from halfbyte.lora.merge_aware_layer import MergeAwareLinear

    return {module.recipe.name: module for module in model.modules() if isinstance(module, MergeAwareLinear)}


def refuse(model: nn.Module, layers: dict[str, "PeftLoraLinear"]) -> None:
    """ValueError that names what a merged weight cannot honour."""
    problems = config_problems(model) + other_adapters(model, layers)
    for fqn, layer in layers.items():
        problems += [f"{base_name(fqn)}: {problem}" for problem in layer_problems(layer)]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"merge-aware LoRA cannot honour this adapter: {'; '.join(problems[:SHOWN])}{more}. "
            "Use one plain LoRA adapter without biases, or train without merge_aware."
        )
    if not layers:
        raise ValueError(
            "merge-aware LoRA needs a LoRA layer over an NVFP4 weight, and this model has none. Attach a LoRA adapter "
            "(get_peft_model) to a base with NVFP4 layers first, or train without merge_aware."
        )


def config_problems(model: nn.Module) -> list[str]:
    """What the adapters' configs ask for and a merged weight cannot give."""
    problems = []
    for adapter, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "bias", "none") != "none":
            problems.append(f"adapter {adapter!r} trains biases of the base (bias={config.bias!r})")
        for option in ("layer_replication", "target_parameters"):
            if getattr(config, option, None):
                problems.append(f"adapter {adapter!r} uses {option}")
    return problems


def other_adapters(model: nn.Module, layers: dict[str, "PeftLoraLinear"]) -> list[str]:
    """NVFP4 layers under an adapter that is no plain LoRA layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        f"{base_name(fqn)}: {type(module).__name__} is no plain LoRA layer"
        for fqn, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
        and isinstance(getattr(module, "base_layer", None), NVFP4Linear)
        and fqn not in layers
    ]


def layer_problems(layer: "PeftLoraLinear") -> list[str]:
    """What one layer cannot honour, over all its adapters: one that is active later counts too."""
    from halfbyte.lora.merge_aware_layer import adapter_problems

    problems = [problem for adapter in layer.lora_A for problem in adapter_problems(layer, adapter)]
    if hasattr(layer, "group"):
        problems.append("its factors are cut over a mesh already; make it merge-aware before")
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    if len(active) > 1:
        problems.append(f"{len(active)} adapters are active ({', '.join(active)}), one can be merged")
    return problems


def start_step(value: int | float, max_steps: int) -> int:
    """The optimizer step from which on training is merge-aware: an int is a step, a float a share of max_steps.

    A function of the step alone, so a resumed run starts where the uninterrupted one would.
    """
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise ValueError(
                f"merge_aware_start_step is {value}: a fraction of the run must be between 0 and 1; write a step as an "
                "integer"
            )
        return round(value * max_steps)
    if value < 0:
        raise ValueError(f"merge_aware_start_step is {value}, expected a step >= 0 or a fraction between 0.0 and 1.0")
    return value


def set_merge_aware(model: nn.Module, active: bool) -> None:
    """Switch between the merged weight and PEFT's unmerged sum, e.g. at the start step. ValueError without layers."""
    layers = merge_aware_layers(model)
    if not layers:
        raise ValueError("this model has no merge-aware layer; call make_merge_aware first")
    for layer in layers.values():
        layer.active = active


def merged_weights(model: nn.Module) -> Iterator[tuple[str, NVFP4Parts]]:
    """(name in the base model, W') of every merge-aware layer, one at a time: the bytes that a merge writes."""
    for name, layer in merge_aware_layers(model).items():
        yield name, layer.merged_weight()


def merged_digest(model: nn.Module) -> str:
    """Digest of all merged weights, equal to that of the merged file (`halfbyte.nvfp4.digest.model_digest`)."""
    return model_digest({name: (parts.shape, weight_digest(parts)) for name, parts in merged_weights(model)})


def quantizer_of(model: nn.Module) -> Quantizer:
    """How the merge-aware layers round, for the adapter's metadata."""
    layers = merge_aware_layers(model).values()
    recipes = {layer.recipe._replace(name="", row_offset=0, column_offset=0, changed=False) for layer in layers}
    if len(recipes) != 1:
        raise ValueError(
            f"expected merge-aware layers that round alike, found {len(recipes)} ways; call make_merge_aware with one "
            "rounding, scales, seed and dtype"
        )
    recipe = recipes.pop()
    dtype = str(recipe.dtype).removeprefix("torch.")
    return Quantizer(rounding=recipe.rounding, scales=recipe.scales, seed=recipe.seed, dtype=dtype)
