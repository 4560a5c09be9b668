"""The communications of tensor parallelism and their gradients.

| function | forward | backward |
|---|---|---|
| `copy_to_mesh` | identity | sum over ranks |
| `sum_over_mesh` | sum over ranks | identity |
| `gather_over_mesh` | join last dimension | own part |

Shoeybi et al., Megatron-LM (arXiv 1909.08053), call the first two f and g. torch's functional collectives are
traceable, but their gradient of an all-reduce is another all-reduce: right for losses that differ, wrong here, where
every rank has the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _CopyToMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumOverMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherOverMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.columns = group, x.shape[-1]
        pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, dist.get_rank(ctx.group) * ctx.columns, ctx.columns), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def copy_to_mesh(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, equal on all ranks of the group, before each rank uses it with its own part of a weight."""
    return _CopyToMesh.apply(x, group)


def gather_over_mesh(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts, joined along the last dimension, on all of them; what follows must be equal on all ranks."""
    return _GatherOverMesh.apply(x, group)


def sum_over_mesh(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the ranks' parts, on all of them."""
    return _SumOverMesh.apply(x, group)
