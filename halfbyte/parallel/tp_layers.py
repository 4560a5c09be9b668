"""Linear layers of which a rank holds a part, and the two kinds of LoRA factor beside them.

    column-wise: a rank holds rows [N/d] of W             row-wise: a rank holds columns [K/d] of W
      y_i = f(x) W_i^T + b_i                                y   = g(x_i W_i^T) + b
      delta_i = f(x A^T) B_i^T      A whole, B cut          delta = g(x_i A_i^T) B^T      A cut, B whole

f copies x to the ranks and sums its gradient, g sums over the ranks (tp_ops.py). The gradient of a whole factor is
equal on all ranks: A's, since f sums what comes from all B_i; B's, since its input is the sum. So nothing is reduced
afterwards, and nothing twice. f stands behind A, not before it: x's gradient through A is then whole as it is.

All are `nn.Linear`s in the place of the layer they came from, so PEFT's forward, names and files stay PEFT's. A layer's
`in_features` and `out_features` are those of the whole weight: PEFT makes, or loads, whole factors beside a layer that
is cut already, and `tensor_parallel` cuts them.
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
from halfbyte.parallel.tp_ops import copy_to_mesh, gather_over_mesh, sum_over_mesh


class ColumnNVFP4Linear(NVFP4Linear):
    """Rows of a packed weight and of its bias."""

    group: ProcessGroup

    @property
    def held_shape(self) -> tuple[int, int]:
        return self.out_features // dist.get_world_size(self.group), self.in_features

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_mesh(input, self.group))


class RowNVFP4Linear(NVFP4Linear):
    """Columns of a packed weight, and the whole bias, which is added once, after the sum."""

    group: ProcessGroup

    @property
    def held_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features // dist.get_world_size(self.group)

    def forward(self, input: Tensor) -> Tensor:
        part = matmul.linear(input, self.qdata, self.scale, self.global_scale, None, self.mesh_activation(input))
        return self.sum_parts(part)

    def sum_parts(self, part: Tensor) -> Tensor:
        """The sum of the ranks' products, with the bias."""
        whole = sum_over_mesh(part, self.group)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)

    def mesh_activation(self, input: Tensor) -> ActivationQuant | None:
        """How the input is quantized, with the tensor scale of the whole input, so that its codes are one process's.

        Waits for the GPU where that scale is dynamic. ValueError, from ActivationQuant, when the input is not finite.
        """
        if self.activation is None or self.activation.scale is not None:
            return self.activation
        low, high = torch.aminmax(input.detach())
        amax = torch.maximum(-low, high).to(matmul.autocast_dtype(input) or input.dtype).float()
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        return ActivationQuant((amax / (E4M3_MAX * E2M1_MAX)).clamp(min=SMALLEST).item())


class ColumnLinear(nn.Linear):
    """Rows of a dense weight and of its bias."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to_mesh(input, self.group))


class GatheredColumnLinear(ColumnLinear):
    """The same with the outputs of all ranks joined, on all of them: for an lm_head."""

    def forward(self, input: Tensor) -> Tensor:
        return gather_over_mesh(super().forward(input), self.group)


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


class WholeFactorB(nn.Linear):
    """lora_B beside a row-wise layer: whole; its input is a sum, equal on all ranks."""


class CutFactorA(nn.Linear):
    """lora_A beside a row-wise layer: its columns that meet this rank's part of the input."""

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return sum_over_mesh(super().forward(input), self.group)


class CutFactorB(nn.Linear):
    """lora_B beside a column-wise layer: the rows of this rank's outputs."""


class CutDropout(nn.Dropout):
    """Dropout of a part of the input: each rank draws the mask of the whole input and uses its columns of it.

    So ranks drop independently of each other and draw alike, which keeps their random states equal, and together they
    do what one process does. The price: a whole mask, of which 1/d is used.
    """

    group: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        size, columns = dist.get_world_size(self.group), input.shape[-1]
        whole = F.dropout(input.new_ones(*input.shape[:-1], columns * size), self.p)
        return input * whole.narrow(-1, dist.get_rank(self.group) * columns, columns)


Packed = (ColumnNVFP4Linear, RowNVFP4Linear)
Column = (ColumnNVFP4Linear, ColumnLinear)
Row = (RowNVFP4Linear, RowLinear)
CUT_DIM: dict[type[nn.Module], int] = {CutFactorA: 1, CutFactorB: 0}
"""Dimension along which a trainable factor's weight is cut; of all others every rank holds the whole."""


def cut_factors(model: nn.Module) -> dict[str, tuple[int, ProcessGroup]]:
    """Name of each trainable parameter that is cut -> (dimension, the ranks that hold its parts)."""
    return {
        f"{fqn}.weight": (CUT_DIM[type(module)], module.group)  # type: ignore[dict-item]
        for fqn, module in model.named_modules()
        if type(module) in CUT_DIM
    }


def cut_tensors(model: nn.Module) -> set[str]:
    """Names of all parameters of which a rank holds a part, those of the base included."""
    found = set(cut_factors(model))
    for fqn, module in model.named_modules():
        if isinstance(module, Packed):
            found |= {f"{fqn}.qdata", f"{fqn}.scale"}
        elif isinstance(module, (ColumnLinear, RowLinear)):
            found.add(f"{fqn}.weight")
        if isinstance(module, Column) and module.bias is not None:
            found.add(f"{fqn}.bias")
    return found


def offsets(base: nn.Module) -> tuple[int, int]:
    """(row, column) of the whole weight at which this rank's part begins."""
    if not isinstance(base, Packed):
        return 0, 0
    rows, columns = base.held_shape
    rank = dist.get_rank(base.group)
    return (rank * rows, 0) if isinstance(base, Column) else (0, rank * columns)


def gathered(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' parts of a tensor, joined along a dimension; on every rank."""
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, tensor.detach().contiguous(), group=group)
    return torch.cat(pieces, dim)


def rebuild(cls: type[Any], old: nn.Linear, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Any:
    """A dense layer of a class above, with this weight and bias; features, training flags as the old one's."""
    new = cls(old.in_features, old.out_features, bias=bias is not None, device="meta", dtype=weight.dtype)
    new.weight = nn.Parameter(weight.detach().clone(), requires_grad=old.weight.requires_grad)
    new.weight.whole_numel = old.weight.numel()  # for optimizers that ask how large a parameter is (optim/state.py)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=old.bias.requires_grad)
    new.group = group
    return new.train(old.training)
