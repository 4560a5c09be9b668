"""Switch a PEFT model's LoRA layers over NVFP4 weights to one fused autograd function each."""

from torch import nn

from halfbyte.nvfp4.convert import replace_module


def fuse(peft_model: nn.Module) -> nn.Module:
    """Replace PEFT's LoRA layers over NVFP4 weights by layers that do the same in less time and memory.

    peft_model  a PeftModel (or a model with injected adapters), before an engine wraps it. Changed in place, and
                returned; parameters keep their identity and names, so an optimizer made before goes on.

    Layers over dense weights, and layers of another class (merge-aware ones), stay as they are.

    PEFT builds its own layers again when it loads a model (`from_pretrained`, `add_adapter` on new targets): call it
    after. What the fused function cannot serve falls back to PEFT's forward (fused_layer.py lists it).
    """
    from peft.tuners.lora import Linear as PeftLoraLinear

    from halfbyte.lora.fused_layer import FusedLoraLinear
    from halfbyte.nvfp4.linear import NVFP4Linear

    layers = {
        fqn: module
        for fqn, module in peft_model.named_modules()
        if type(module) is PeftLoraLinear and isinstance(module.base_layer, NVFP4Linear)
    }
    for fqn, layer in layers.items():
        replace_module(peft_model, fqn, FusedLoraLinear.from_peft(layer))
    return peft_model
