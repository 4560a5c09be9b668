"""PEFT's LoRA layers over a base that is cut over a mesh: plain, fused, and merge-aware.

Fused, a layer's sums take one message each way instead of two, and a small one of the whole factor's gradient:

    column-wise  y_i = fused(f(x), f(A), B_i)           row-wise  y = g(fused(x_i, A_i, f(B))) + b

Merge-aware, a rank computes W' of its own slice, bit for bit the slice of the whole W': the dither knows where the
slice begins, and columns are cut between blocks of 16.

    column-wise                                     row-wise
      W'_i = Q(W_i + s B_i A)                         W'_i = Q(W_i + s B A_i)
      y_i = f(x) W'_i^T + b_i                         y = g(x_i W'_i^T) + b
      dA = sum_i s (g_i B_i)^T x: f before A          dB = sum_i s g^T (x_i A_i^T): f before B

The sums of whole factors' gradients are the only ones, and what dropout adds goes through the plain factors.
"""

from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from halfbyte.lora.fused_layer import FusedLoraLinear, is_frozen_weight_only
from halfbyte.lora.merge_aware_layer import MergeAwareLinear
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.parallel.tp_layers import Column, CutDropout, Packed, RowNVFP4Linear, offsets
from halfbyte.parallel.tp_ops import copy_to_mesh


class CutLoraLinear(PeftLoraLinear):
    """PEFT's layer, step by step over the parts; without mixed batches."""

    group: ProcessGroup

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse_mixed_batch(kwargs)
        return super().forward(x, *args, **kwargs)


class CutFusedLoraLinear(FusedLoraLinear):
    """A fused layer over a rank's part of the base; dropout on a part of the input goes PEFT's way."""

    group: ProcessGroup

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse_mixed_batch(kwargs)
        return super().forward(x, *args, **kwargs)

    def fused(self, x: Tensor, lora_A: Tensor, lora_B: Tensor, adapter: str, bias: Tensor | None) -> Tensor:
        base, group = self.base_layer, self.group
        if not isinstance(base, RowNVFP4Linear):
            return super().fused(copy_to_mesh(x, group), copy_to_mesh(lora_A, group), lora_B, adapter, bias)
        return base.sum_parts(super().fused(x, lora_A, copy_to_mesh(lora_B, group), adapter, None))

    def serves(self, base: nn.Module, *others: nn.Module) -> bool:
        return isinstance(base, Packed) and is_frozen_weight_only(base) and not drops_a_part(*others)


def refuse_mixed_batch(kwargs: dict[str, Any]) -> None:
    if kwargs.get("adapter_names") is not None:
        raise ValueError(
            f"adapter_names mixes adapters in a batch: found {sorted(set(kwargs['adapter_names']))}, but layers that "
            "are cut over a mesh expect one. Run each adapter's samples on their own."
        )


def drops_a_part(*modules: nn.Module) -> bool:
    return any(isinstance(module, CutDropout) and module.training and module.p > 0 for module in modules)


class CutMergeAwareLinear(MergeAwareLinear):
    """A merge-aware layer over a rank's part of the base; unmerged where it is not active, as `CutLoraLinear`."""

    group: ProcessGroup

    def merged_product(
        self, x: Tensor, adapter: str, bias: Tensor | None, activation: ActivationQuant | None
    ) -> Tensor:
        base = self.base_layer
        if not isinstance(base, RowNVFP4Linear):
            return super().merged_product(copy_to_mesh(x, self.group), adapter, bias, activation)
        return base.sum_parts(super().merged_product(x, adapter, None, base.mesh_activation(x)))

    def factors(self, adapter: str) -> tuple[Tensor, Tensor, float]:
        lora_A, lora_B, scaling = super().factors(adapter)
        self.look_for_change(lora_A, lora_B)
        if isinstance(self.base_layer, Column):
            return copy_to_mesh(lora_A, self.group), lora_B, scaling
        return lora_A, copy_to_mesh(lora_B, self.group), scaling

    @torch.no_grad()
    def look_for_change(self, lora_A: Tensor, lora_B: Tensor) -> None:
        """On fresh scales a weight stays as it is while its change is zero: ask about the whole change."""
        if self.recipe.scales == "keep":
            return
        both = torch.stack([lora_A.any(), lora_B.any()]).int()
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.group)
        changed = bool(both.all())
        if changed != self.recipe.changed:
            self.recipe, self.kept = self.recipe._replace(changed=changed), None


def cut_lora_layer(layer: PeftLoraLinear, group: ProcessGroup) -> PeftLoraLinear:
    """The layer's counterpart over a cut base, with the same parameters, modules, hooks and settings."""
    changed: dict[str, Any] = {"group": group}
    if not isinstance(layer, MergeAwareLinear):
        cls = CutFusedLoraLinear if isinstance(layer, FusedLoraLinear) else CutLoraLinear
        plain = cls.__new__(cls)
        plain.__dict__.update(layer.__dict__ | changed)
        return plain
    row, column = offsets(layer.base_layer)  # type: ignore[arg-type]
    changed |= {"recipe": layer.recipe._replace(row_offset=row, column_offset=column), "kept": None}
    merge_aware = CutMergeAwareLinear.__new__(CutMergeAwareLinear)
    merge_aware.__dict__.update(layer.__dict__ | changed)
    return merge_aware
