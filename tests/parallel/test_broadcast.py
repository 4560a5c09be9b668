"""Tensors of any dtype, shape and stride arrive byte for byte, in few messages."""

import torch
import torch.distributed as dist
from torch import Tensor

from halfbyte.parallel.broadcast import broadcast_tensors, plan
from tests.dist import run


def awkward_tensors(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    raw = torch.randint(0, 256, (4, 64), dtype=torch.uint8)
    tensors = [raw[0].view(dtype).clone() for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.float64)]
    tensors += [raw.clone().view(torch.float8_e4m3fn), torch.tensor(float(seed)), torch.randn(17), torch.empty(0, 3)]
    tensors += [
        torch.randn(6, 10).t(),
        torch.randn(20)[::2],
        torch.tensor([bool(seed)]),
        torch.randn(3).to(torch.cfloat),
    ]
    return [*tensors, torch.arange(256, dtype=torch.uint8) ^ seed]  # every bit pattern, E4M3's NaNs among them


def received(bucket_bytes: int) -> bool:
    tensors = awkward_tensors(dist.get_rank())
    size = broadcast_tensors(tensors, bucket_bytes=bucket_bytes)
    same = all(
        torch.equal(t.contiguous().reshape(-1).view(torch.uint8), e.contiguous().reshape(-1).view(torch.uint8))
        for t, e in zip(tensors, awkward_tensors(0), strict=True)
    )
    return same and size >= sum(t.nbytes for t in tensors)


def test_bytes_arrive_whatever_the_bucket() -> None:
    for bucket_bytes in (1, 100, 2**20):
        assert all(run(2, received, bucket_bytes))


def from_last_rank() -> float:
    tensor = torch.tensor(float(dist.get_rank()))
    broadcast_tensors([tensor], src=3)
    return tensor.item()


def test_any_rank_can_be_the_source() -> None:
    assert run(4, from_last_rank) == [3.0] * 4


def test_buckets_are_large_and_few() -> None:
    mib = 2**20
    sizes = [1, 40 * mib, 100, 30 * mib, 200 * mib, 7, 64 * mib, 3]
    buckets = plan([torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes], 64 * mib)
    assert [len(b.tensors) for b in buckets] == [4, 1, 1, 2]  # the rest comes last
    assert all(b.size >= 64 * mib for b in buckets[:-1])
