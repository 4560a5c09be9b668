"""Switch a PEFT model's LoRA layers over NVFP4 weights to one fused autograd function each."""

from torch import nn

from halfbyte.nvfp4.convert import replace_module


def fuse(model: nn.Module) -> int:
    """Replace PEFT's LoRA layers over NVFP4 weights by layers that do the same in less time and memory.

    model    a PeftModel (or a model with injected adapters), before an engine wraps it. Changed in place; parameters
             keep their identity and names, so an optimizer made before goes on.
    returns  how many layers were replaced. Layers over dense weights, and layers of another class (merge-aware ones),
             stay; so a second call returns 0.

    PEFT builds its own layers again when it loads a model (`from_pretrained`, `add_adapter` on new targets): call it
    after. What the fused function cannot serve falls back to PEFT's forward (fused_layer.py lists it).
    """
    from peft.tuners.lora import Linear as PeftLoraLinear

    from halfbyte.lora.fused_layer import FusedLoraLinear
    from halfbyte.nvfp4.linear import NVFP4Linear

    layers = {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module) is PeftLoraLinear and isinstance(module.base_layer, NVFP4Linear)
    }
    for fqn, layer in layers.items():
        replace_module(model, fqn, FusedLoraLinear.from_peft(layer))
    return len(layers)
