"""Broadcast many tensors as few large messages, byte for byte.

A model is thousands of tensors, many of them tiny: one broadcast each is latency. Here they are copied into buckets
of 64 MiB, as bytes, and a bucket travels while the next is filled. A tensor of a bucket's size travels from where it
lies.

Bytes, not values: gloo refuses float8, and nothing on the way may canonicalize a NaN (block scales are bit patterns).
Rejected: torch's `_broadcast_coalesced`, which is private, wants one dtype a bucket and has no staging for a group
whose backend only speaks to another device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16  # bytes: a view of the bucket under any dtype starts at a multiple of its item size


@dataclass
class Bucket:
    """Tensors that travel in one message, and where each starts in it."""

    tensors: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0  # bytes, with padding between tensors

    def add(self, tensor: Tensor) -> None:
        start = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.tensors.append(tensor)
        self.offsets.append(start)
        self.size = start + tensor.nbytes

    def views(self, buffer: Tensor) -> list[Tensor]:
        """One view of the buffer per tensor, with its dtype and shape."""
        return [
            buffer[start : start + t.nbytes].view(t.dtype).view(t.shape)
            for t, start in zip(self.tensors, self.offsets, strict=True)
        ]


def broadcast_tensors(
    tensors: Iterable[Tensor],
    *,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Overwrite each tensor with the one that rank `src` of the group holds; return the bytes sent.

    tensors       same order, shapes and dtypes on every rank (not checked here); any device, any strides.
    bucket_bytes  a message has at least this many bytes, as long as enough are left.
    memory        two buckets on the group's device.
    """
    device = group_device(group)
    is_source = dist.get_rank(group) == src
    buckets = plan(tensors, bucket_bytes)
    flying: list[tuple[Bucket, Tensor, dist.Work]] = []
    for bucket in buckets:
        message = _message(bucket, device, fill=is_source)
        flying.append((bucket, message, dist.broadcast(message, group=group, group_src=src, async_op=True)))
        if len(flying) == 2:
            _land(*flying.pop(0), unpack=not is_source)
    for entry in flying:
        _land(*entry, unpack=not is_source)
    return sum(bucket.size for bucket in buckets)


def plan(tensors: Iterable[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Assign tensors to buckets by their sizes alone, so that all ranks arrive at the same messages."""
    buckets, filling = [], Bucket()
    for tensor in tensors:
        if tensor.nbytes >= bucket_bytes:
            buckets.append(Bucket([tensor], [0], tensor.nbytes))
        elif tensor.nbytes:
            filling.add(tensor)
        if filling.size >= bucket_bytes:
            buckets.append(filling)
            filling = Bucket()
    return [*buckets, filling] if filling.tensors else buckets


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the group's collectives want their tensors: this rank's GPU for NCCL, the CPU for gloo."""
    backend = dist.get_backend_config(group)
    if "nccl" in str(backend) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_bytes(tensor: Tensor) -> Tensor:
    """The storage of a contiguous tensor as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _message(bucket: Bucket, device: torch.device, *, fill: bool) -> Tensor:
    """The bytes that travel: the tensor's own storage if it is alone and lies right, otherwise a buffer."""
    first = bucket.tensors[0]
    if len(bucket.tensors) == 1 and first.is_contiguous() and first.device == device:
        return as_bytes(first)
    buffer = torch.empty(bucket.size, dtype=torch.uint8, device=device)
    if fill:
        _copy(bucket.views(buffer), bucket.tensors)
    return buffer


def _land(bucket: Bucket, message: Tensor, work: dist.Work, *, unpack: bool) -> None:
    """Wait for a message, and copy it out unless it arrived in place."""
    work.wait()
    if unpack and message.data_ptr() != bucket.tensors[0].data_ptr():
        _copy(bucket.tensors, bucket.views(message))


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
