"""Joining the processes that `torchrun` or `accelerate launch` has started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def rank() -> int:
    """This process's number among all; 0 when nothing distributed runs."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Inside the block, the processes of the launch form a group: NCCL for a GPU each, gloo for CPUs.

    Does nothing for a process that was started alone, or that has joined a group already; otherwise leaves the group at
    the end of a block that went well. Accelerate, `Trainer` and DeepSpeed take the group as they find it.
    raises  ValueError when the launch has more processes on this host than the host has GPUs.
    """
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ
    if alone or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"the launch has a process with local rank {local_rank}, but this host has {torch.cuda.device_count()} "
                "GPUs: start at most that many processes (--nproc-per-node), or set device to cpu."
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield
    dist.destroy_process_group()
