"""Which layers of a model are cut, and how; and what cannot be, said before any weight is loaded or moved.

The plan is the model's own, transformers' `base_model_tp_plan`: q, k, v, gate, up by rows, o, down by columns. What it
does not name (norms, lm_head) is whole on every rank, and so are embeddings. A plan that is handed over may also cut
lm_head by rows and join its outputs.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from halfbyte.lora.names import base_name
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.nvfp4.linear import NVFP4Linear

COLUMN, ROW, GATHERED = "colwise", "rowwise", "colwise_gather_output"
STYLES = (COLUMN, ROW, GATHERED)
WHOLE = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise")
Plan = dict[str, str]  # fqn of a linear, or of PEFT's layer around it -> style


def plan_of(model: nn.Module, patterns: Mapping[str, str] | None = None) -> Plan:
    """The layers to cut.

    model     real or on the meta device, with adapters or without.
    patterns  names with * for numbers -> transformers' name of a style; None takes the model's own.
    raises    ValueError when there is no plan, or one with an entry that we do not follow.
    """
    config: Any = getattr(model, "config", None)
    patterns = patterns or getattr(config, "base_model_tp_plan", None) or {}
    if not patterns:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan in its config (base_model_tp_plan), expected one that "
            "names its layers; train with DDP, FSDP2 or DeepSpeed"
        )
    found = {}
    for fqn, module in model.named_modules():
        style = style_of(base_name(fqn), patterns) if ".base_layer" not in fqn else None
        if style is not None and takes_part(fqn, module, style):
            found[fqn] = style
    for name, _ in model.named_parameters():
        style = style_of(base_name(name), patterns)
        if style is not None:
            raise ValueError(unknown(name, style, "a parameter that is no linear layer's weight"))
    return found


def style_of(name: str, patterns: Mapping[str, str]) -> str | None:
    """The style of the first entry that names it."""
    for pattern, style in patterns.items():
        if re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", name):
            return style
    return None


def takes_part(fqn: str, module: nn.Module, style: str) -> bool:
    """Whether a module that the plan names is cut. ValueError for a style that we do not follow there."""
    if style in STYLES and (isinstance(module, nn.Linear) or hasattr(module, "base_layer")):
        return True
    if style in STYLES and hasattr(module, "modules_to_save"):
        raise ValueError(
            f"{base_name(fqn)}: found a module trained in full (modules_to_save), expected a frozen layer, since the "
            f"plan cuts it ({style}); adapt it with target_modules, or take it out of the plan"
        )
    if style not in WHOLE or isinstance(module, nn.Linear):
        raise ValueError(unknown(fqn, style, type(module).__name__))
    if style == "replicated_with_grad_allreduce" and any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"{base_name(fqn)}: found a trained {type(module).__name__} whose gradient the plan wants summed, expected "
            "a frozen one; leave it out of modules_to_save"
        )
    return False


def unknown(name: str, style: str, what: str) -> str:
    return (
        f"{base_name(name)}: the plan says {style} for {what}, expected {', '.join(STYLES)} for a linear layer; hand "
        "over a plan without this entry (plan=...), or train with DDP, FSDP2 or DeepSpeed"
    )


def check(model: nn.Module, plan: Plan, degree: int) -> None:
    """ValueError for heads or columns that do not divide, and for adapters that this layout cannot hold."""
    config: Any = model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % degree:
            raise ValueError(
                f"{name} is {heads}, expected a multiple of the {degree} ranks that share a layer; use a degree that "
                f"divides it: {divisors(heads)}"
            )
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for fqn, style in plan.items():
        module = model.get_submodule(fqn)
        if f"{base_name(fqn)}.weight" in tied:
            raise ValueError(
                f"{base_name(fqn)}: found a weight that is tied to the embeddings, which stay whole, expected one of "
                "its own; take the layer out of the plan"
            )
        check_layer(base_name(fqn), style, base_of(module), degree)
        check_adapter(base_name(fqn), style, module)


def base_of(module: Any) -> Any:
    """The linear that PEFT's layer surrounds, or the module itself."""
    return getattr(module, "base_layer", module)


def check_layer(name: str, style: str, base: nn.Linear, degree: int) -> None:
    kind, size = ("in_features", base.in_features) if style == ROW else ("out_features", base.out_features)
    if size % degree:
        raise ValueError(
            f"{name}: {kind} is {size}, expected a multiple of the {degree} ranks; use a degree that divides it"
        )
    if isinstance(base, NVFP4Linear) and style == ROW and size // degree % BLOCK_SIZE:
        raise ValueError(
            f"{name}: in_features {size} over {degree} ranks gives {size // degree} columns, expected a multiple of "
            f"{BLOCK_SIZE}: the number of ranks must divide {size // BLOCK_SIZE}; use such a degree"
        )
    if isinstance(base, NVFP4Linear) and style == GATHERED:
        raise ValueError(f"{name}: found packed weights, expected dense ones for {style}; plan it as {COLUMN}, or not")
    trained = [part for part, parameter in base.named_parameters(recurse=False) if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"{name}: found a {trained[0]} that is trained, expected a frozen base; freeze it, and train an adapter "
            "with bias='none'"
        )


def check_adapter(name: str, style: str, module: Any) -> None:
    """ValueError for an adapter on the layer that is no plain LoRA."""
    if not hasattr(module, "base_layer"):
        return
    from peft.tuners.lora import Linear as PeftLoraLinear

    problem = None
    if not isinstance(module, PeftLoraLinear):
        problem = f"found {type(module).__module__}.{type(module).__name__}, expected plain LoRA"
    elif module.lora_variant:
        variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        problem = f"found {', '.join(variants)} (DoRA and other LoRA variants), expected plain LoRA"
    elif any(module.lora_bias.values()):
        problem = "found a bias in the adapter, which every rank would add, expected lora_bias=False"
    elif module.merged_adapters:
        problem = f"found {', '.join(module.merged_adapters)} merged into the base, expected adapters beside it"
    elif style == GATHERED:
        problem = f"found an adapter on a layer whose outputs are joined, expected none there or the style {COLUMN}"
    if problem:
        raise ValueError(f"{name}: {problem}; use plain LoRA on {COLUMN} and {ROW} layers, or DDP, FSDP2")


def divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
