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

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from halfbyte.nvfp4 import matmul
from halfbyte.nvfp4.linear import NVFP4Linear
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
        part = matmul.linear(input, self.qdata, self.scale, self.global_scale, None, self.activation)
        whole = sum_over_mesh(part, self.group)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


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


def rebuild(cls: type[Any], old: nn.Linear, weight: Tensor, bias: Tensor | None, group: ProcessGroup) -> Any:
    """A dense layer of a class above, with this weight and bias, training flags as the old one's."""
    new = cls(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    new.weight = nn.Parameter(weight.detach().clone(), requires_grad=old.weight.requires_grad)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=old.bias.requires_grad)
    new.group = group
    return new.train(old.training)
