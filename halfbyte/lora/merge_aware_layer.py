"""PEFT's LoRA layer, computing with the weight that the merge will write.

A subclass of PEFT's own layer that takes over the old layer's attributes: parameters, names, saving, loading, adding,
switching, disabling and deleting adapters are PEFT's. Only the forward differs. What it cannot honour is refused, by
`make_merge_aware` before training where it can be seen, else here; it never falls back to the unmerged sum.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn

from halfbyte.lora.fused_layer import FusedLoraLinear
from halfbyte.lora.merge import Recipe, merge
from halfbyte.lora.merge_aware_matmul import Components, merge_aware_linear
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear


@dataclass
class KeptWeight:
    """The packed W' of one optimizer step, with copies of all that it depends on.

    The factors are compared by value: any in-place change is seen, also one through `.data` or a kernel that PyTorch
    does not know of, which a version counter would miss. 0.5 bytes a weight and a copy of the factors.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    base: tuple[tuple[int, int], ...]
    components: Components

    def fits(self, lora_A: Tensor, lora_B: Tensor, scaling: float, base: Components) -> bool:
        """True while nothing changed."""
        return (
            self.scaling == scaling
            and self.base == stamp(base)
            and same_values(self.lora_A, lora_A)
            and same_values(self.lora_B, lora_B)
        )


def components_of(layer: NVFP4Linear) -> Components:
    """The frozen parameters themselves, not views: engines that move their storage refill them before backward."""
    return layer.qdata, layer.scale, layer.global_scale


def stamp(components: Components) -> tuple[tuple[int, int], ...]:
    """Address and version of each frozen component."""
    return tuple((component.data_ptr(), component._version) for component in components)


def same_values(kept: Tensor, now: Tensor) -> bool:
    return kept.device == now.device and kept.dtype == now.dtype and torch.equal(kept, now)


class MergeAwareLinear(FusedLoraLinear):
    """PEFT's `lora.Linear` over an NVFP4Linear; y = x W'^T + bias with W' = Q(W + s B A).

    recipe   how W' is rounded, of this layer.
    keep     keep the packed W' until a factor changes (else each forward and backward computes it); None: on a CPU.
    active   False: the unmerged sum, as a fused layer computes it (before the start step).
    merged_from   dtype of the factors in the last forward; an engine's policy may have cast them for it.
    """

    recipe: Recipe
    keep: bool | None
    active: bool
    kept: KeptWeight | None
    merged_from: torch.dtype | None

    @classmethod
    def from_peft(  # type: ignore[override]  # also takes how to merge
        cls, layer: PeftLoraLinear, recipe: Recipe, keep: bool | None, active: bool
    ) -> "MergeAwareLinear":
        """A layer that shares the old one's parameters, modules, hooks and settings."""
        merge_aware = cls.__new__(cls)
        merge_aware.__dict__.update(layer.__dict__)
        merge_aware.recipe, merge_aware.keep, merge_aware.active = recipe, keep, active
        merge_aware.kept = merge_aware.merged_from = None
        return merge_aware

    @torch.compiler.disable
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] -> [..., out] in x's dtype. Not compiled: whether the kept W' still fits depends on values."""
        adapter = None if self.disable_adapters else self.merge_aware_adapter()
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                f"{self.recipe.name}: adapter_names mixes adapters in a batch, but a merge-aware layer has one merged "
                "weight. Run each adapter's samples on their own."
            )
        if adapter is None or not self.active:
            return super().forward(x, *args, **kwargs)
        y = self.merged_product(x, adapter, self.frozen().bias, self.frozen().activation)
        return y + self.dropout_residual(x, adapter).to(y.dtype) if self.drops(adapter) else y

    def merged_product(
        self, x: Tensor, adapter: str, bias: Tensor | None, activation: ActivationQuant | None
    ) -> Tensor:
        """x W'^T + bias."""
        lora_A, lora_B, scaling = self.factors(adapter)
        self.merged_from = lora_A.dtype
        components: Components = components_of(self.frozen())
        recipe: Recipe | None = self.recipe
        if x.device.type == "cpu" if self.keep is None else self.keep:
            components, recipe = self.kept_components(lora_A, lora_B, scaling), None
        return merge_aware_linear(
            x, lora_A, lora_B, components, bias, scaling=scaling, recipe=recipe, activation=activation
        )

    def frozen(self) -> NVFP4Linear:
        """The frozen layer."""
        return cast(NVFP4Linear, self.base_layer)

    def factors(self, adapter: str) -> tuple[Tensor, Tensor, float]:
        """(lora_A [r, K], lora_B [N, r], scaling) of an adapter."""
        lora_A, lora_B = cast(nn.Linear, self.lora_A[adapter]), cast(nn.Linear, self.lora_B[adapter])
        return lora_A.weight, lora_B.weight, self.scaling[adapter]

    def drops(self, adapter: str) -> bool:
        """True where dropout changes the adapter's input."""
        dropout = self.lora_dropout[adapter]
        return self.training and isinstance(dropout, nn.Dropout) and dropout.p > 0

    def dropout_residual(self, x: Tensor, adapter: str) -> Tensor:
        """What dropout adds to the adapter's branch: s B A (drop(x) - x). The un-dropped term went through Q."""
        lora_A, lora_B = self.lora_A[adapter], self.lora_B[adapter]
        x = self._cast_input_dtype(x, self.factors(adapter)[0].dtype)
        return lora_B(lora_A(self.lora_dropout[adapter](x) - x)) * self.scaling[adapter]

    def merge_aware_adapter(self) -> str | None:
        """The active adapter of this layer, or None; ValueError for what cannot be merged into one weight."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        problems = [problem for name in active for problem in adapter_problems(self, name)]
        if len(active) > 1:
            problems.append(f"{len(active)} adapters are active ({', '.join(active)}), one can be merged")
        if problems:
            raise ValueError(
                f"{self.recipe.name}: merge-aware LoRA cannot honour this: {'; '.join(problems)}. Activate one plain, "
                "unmerged LoRA adapter (set_adapter)."
            )
        return active[0] if active else None

    def merged_weight(self) -> NVFP4Parts:
        """W' of the active adapter, the base where none is active: the bytes that a merge writes."""
        adapter = self.merge_aware_adapter()
        parts = self.frozen().parts()
        if adapter is None:
            return parts
        lora_A, lora_B, scaling = self.factors(adapter)
        return merge(parts, lora_A, lora_B, scaling, self.recipe)

    def kept_components(self, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Components:
        """The packed W', computed when a factor, the scaling or the base changed since."""
        layer = self.frozen()
        base = components_of(layer)
        if self.kept is None or not self.kept.fits(lora_A, lora_B, scaling, base):
            self.kept = None  # before the new one is computed: never two
            merged = merge(layer.parts(), lora_A, lora_B, scaling, self.recipe)
            components = (merged.qdata, merged.scale.view(torch.uint8), layer.global_scale)
            factors = lora_A.detach().clone(), lora_B.detach().clone()
            self.kept = KeptWeight(*factors, scaling, stamp(base), components)
        return self.kept.components


def adapter_problems(layer: PeftLoraLinear, adapter: str) -> list[str]:
    """What about an adapter of a layer cannot be written into the merged weight, in words."""
    problems = []
    if adapter in layer.lora_variant:
        problems.append(f"adapter {adapter!r} is {type(layer.lora_variant[adapter]).__name__}, not plain LoRA")
    if layer.lora_bias.get(adapter):
        problems.append(f"adapter {adapter!r} has a bias (lora_bias=True)")
    if layer.fan_in_fan_out:
        problems.append("fan_in_fan_out is set")
    if layer.merged_adapters:
        problems.append(f"{', '.join(layer.merged_adapters)} is merged already")
    return problems
