"""PEFT's LoRA layer with its forward in one autograd function, where the case is the ordinary one.

It is a subclass of PEFT's own layer that shares the old layer's attributes, so saving, loading, adding, switching,
disabling and deleting adapters are PEFT's. What the function does not serve goes to PEFT's forward, step by step: no
adapter or several active, merged or mixed batches, DoRA and other variants, a bias in the adapter, a quantized input, a
base bias that is trained, and modules inside that somebody hooked (ZeRO-3, offloading) and that must be called.
"""

from typing import Any, cast

from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn

from halfbyte.lora.fused_matmul import lora_linear
from halfbyte.nvfp4.linear import NVFP4Linear

PLAIN = (nn.Linear, nn.Identity, nn.Dropout)  # what PEFT makes an ordinary adapter of


class FusedLoraLinear(PeftLoraLinear):
    """PEFT's `lora.Linear` over an NVFP4Linear."""

    @classmethod
    def from_peft(cls, layer: PeftLoraLinear) -> "FusedLoraLinear":
        """A layer with the same parameters, modules, hooks and settings: the attributes are shared, not copied."""
        fused = cls.__new__(cls)
        fused.__dict__.update(layer.__dict__)
        return fused

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out] in x's dtype."""
        adapter = None if args or kwargs else self.plain_adapter()
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        lora_A, lora_B = cast(nn.Linear, self.lora_A[adapter]), cast(nn.Linear, self.lora_B[adapter])
        return self.fused(x, lora_A.weight, lora_B.weight, adapter, cast(NVFP4Linear, self.base_layer).bias)

    def fused(self, x: Tensor, lora_A: Tensor, lora_B: Tensor, adapter: str, bias: Tensor | None) -> Tensor:
        """The layer with these factors of a served adapter."""
        base, dropout = cast(NVFP4Linear, self.base_layer), self.lora_dropout[adapter]
        return lora_linear(
            x,
            lora_A,
            lora_B,
            (base.qdata, base.scale, base.global_scale),
            bias,
            scaling=self.scaling[adapter],
            p=dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0,
        )

    def plain_adapter(self) -> str | None:
        """The one active adapter, if the fused function serves it; else None."""
        if self.disable_adapters or self.merged:
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or active[0] in self.lora_variant or self.lora_bias.get(active[0]):
            return None
        adapter, base = active[0], self.base_layer
        inside = (base, self.lora_A[adapter], self.lora_B[adapter], self.lora_dropout[adapter])
        return adapter if self.serves(*inside) and not any(map(is_hooked, inside)) else None

    def serves(self, base: nn.Module, *others: nn.Module) -> bool:
        """Whether the function computes what these modules (base, factors, dropout) would."""
        return type(base) is NVFP4Linear and is_frozen_weight_only(base) and all(type(m) in PLAIN for m in others)


def is_frozen_weight_only(base: NVFP4Linear) -> bool:
    """Its input as it comes, and no trained bias."""
    if base.activation is not None:
        return False
    return base.bias is None or not base.bias.requires_grad


def is_hooked(module: nn.Module) -> bool:
    """True when calling the module does more than its class's forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
