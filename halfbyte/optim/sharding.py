"""What an optimizer must know of a parameter that is spread over a mesh.

A state is held as plain local tensors, cut into blocks over the flattened *local* shard, so the kernels never see a
mesh. Whether a parameter is quantized, and which random numbers round its elements, depends on the whole parameter.
Rejected: DTensor states in memory. Every elementwise DTensor operation costs 50 us of dispatch, and a block's scale has
no place in a tensor that is sharded by rows.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.optim.rounding import Counter


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; imports torch.distributed only for types that could be one."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Any) -> Tensor:
    """The local shard of a DTensor, or the tensor itself; call it without autograd."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_grad(param: Any, grad: Any) -> Tensor:
    """The gradient of the local shard: reduced and moved to the parameter's placements where they differ."""
    if not is_dtensor(grad):
        return arrived(grad)
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return arrived(grad.to_local())


def arrived(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a functional collective that is still under way brings."""
    if type(tensor) is Tensor:
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def local_region(param: Any, whole: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset) of the parameter's shard, or of a tensor of shape `whole` that shards as it does."""
    whole = tuple(param.shape) if whole is None else tuple(whole)
    if not is_dtensor(param):
        return whole, (0,) * len(whole)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(whole, param.device_mesh, param.placements)
    return tuple(shape), tuple(offset)


def counter_of(param: Any, seed: int) -> Counter:
    """The global element indices of a local shard, for stochastic rounding.

    raises ValueError when the shard is cut along two dimensions after the first: its index would need a third
           stride, and no engine shards so.
    """
    shape, offset = local_region(param)
    numel, whole = math.prod(shape), tuple(param.shape)
    cut = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    inner = [dim for dim in cut if dim > 0]
    if len(inner) > 1:
        raise ValueError(
            f"a parameter of shape {list(whole)} is sharded along dimensions {cut}; bf16_stochastic_round supports one "
            "sharded dimension beside the first. Set bf16_stochastic_round=False."
        )
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    start = sum(o * s for o, s in zip(offset, strides, strict=True))
    if not inner or numel == 0:
        return Counter(seed, start, max(numel, 1), max(numel, 1))
    dim = inner[0]
    return Counter(seed, start, shape[dim] * strides[dim], whole[dim] * strides[dim])


def to_dtensor(local: Tensor, like: Any, shape: tuple[int, ...]) -> Tensor:
    """A local piece as a DTensor of the global `shape` with the mesh and placements of `like`."""
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def replicated(local: Tensor, like: Any) -> Tensor:
    """The whole tensor on every rank as a DTensor with `Replicate` placements on the mesh of `like`."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(local, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def own_slice(whole: Tensor, param: Any) -> Tensor:
    """The part of a whole tensor that this rank holds if it shards as `param` does."""
    shape, offset = local_region(param, tuple(whole.shape))
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
