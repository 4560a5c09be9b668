"""Linear layers of which a rank holds a part, and the two kinds of LoRA factor beside them.

    column-wise: a rank holds rows [N/d] of W             row-wise: a rank holds columns [K/d] of W
      y_i = f(x) W_i^T + b_i                                y   = g(x_i W_i^T) + b
      delta_i = f(x A^T) B_i^T      A whole, B cut          delta = g(x_i A_i^T) B^T      A cut, B whole

f copies x to the ranks and sums its gradient, g sums over the ranks (tp_ops.py). The gradient of a whole factor is
equal on all ranks: A's, since f sums what comes from all B_i; B's, since its input is the sum. So nothing is reduced
afterwards, and nothing twice. f stands behind A, not before it: x's gradient through A is then whole as it is.

All are `nn.Linear`s in the place of the layer they came from, so PEFT's forward, names and files stay PEFT's.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from halfbyte.nvfp4 import matmul
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.format import E4M3_MAX
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.nvfp4.scaling import E2M1_MAX, SMALLEST
from halfbyte.parallel.tp_ops import copy_to_mesh, sum_over_mesh


class ColumnNVFP4Linear(NVFP4Linear):
    """Rows of a packed weight and of its bias."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_mesh(input, self.group))


class RowNVFP4Linear(NVFP4Linear):
    """Columns of a packed weight, and the whole bias, which is added once, after the sum."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        activation = self.activation
        if activation is not None and activation.scale is None:
            activation = ActivationQuant(self.mesh_scale(input))
        part = matmul.linear(input, self.qdata, self.scale, self.global_scale, None, activation)
        whole = sum_over_mesh(part, self.group)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)

    def mesh_scale(self, input: Tensor) -> float:
        """Tensor scale of the whole input, of which a rank holds a part, so that its codes are those of one process.

        Waits for the GPU. ValueError, from ActivationQuant, when the input is not finite.
        """
        low, high = torch.aminmax(input.detach())
        amax = torch.maximum(-low, high).float()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        return (amax / (E4M3_MAX * E2M1_MAX)).clamp(min=SMALLEST).item()


class ColumnLinear(nn.Linear):
    """Rows of a dense weight and of its bias."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_mesh(input, self.group))


class RowLinear(nn.Linear):
    """Columns of a dense weight, and the whole bias."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        whole = sum_over_mesh(F.linear(input, self.weight), self.group)
        return whole if self.bias is None else whole + self.bias


class WholeFactorA(nn.Linear):
    """lora_A beside a column-wise layer: whole, its output handed to each rank's part of lora_B."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return copy_to_mesh(super().forward(input), self.group)


class CutFactorA(nn.Linear):
    """lora_A beside a row-wise layer: its columns that meet this rank's part of the input."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return sum_over_mesh(super().forward(input), self.group)


class CutFactorB(nn.Linear):
    """lora_B beside a column-wise layer: the rows of this rank's outputs."""


CUT_DIM: dict[type[nn.Module], int] = {CutFactorA: 1, CutFactorB: 0}
"""Dimension along which a trainable factor's weight is cut; of all others every rank holds the whole."""


def cut_factors(model: nn.Module) -> dict[str, tuple[int, ProcessGroup]]:
    """Name of each trainable parameter that is cut -> (dimension, the ranks that hold its parts)."""
    return {
        f"{fqn}.weight": (CUT_DIM[type(module)], module.group)  # type: ignore[dict-item]
        for fqn, module in model.named_modules()
        if type(module) in CUT_DIM
    }


def whole_features(base: nn.Linear) -> tuple[int, int]:
    """(out, in) features of a layer, counted over all ranks that share it."""
    size = dist.get_world_size(base.group) if hasattr(base, "group") else 1  # type: ignore[arg-type]
    rows = size if isinstance(base, (ColumnNVFP4Linear, ColumnLinear)) else 1
    columns = size if isinstance(base, (RowNVFP4Linear, RowLinear)) else 1
    return rows * base.out_features, columns * base.in_features


def gathered(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' parts of a tensor, joined along a dimension; on every rank."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor.detach().contiguous(), group=group)
    return torch.cat(pieces, dim)


def rebuild(cls: type[Any], old: nn.Linear, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Any:
    """A dense layer of a class above, with this weight and bias, training flags as the old one's."""
    new = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    new.weight = nn.Parameter(weight.detach().clone(), requires_grad=old.weight.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=old.bias.requires_grad)
    new.group = group
    return new.train(old.training)
