"""Make every rank hold rank zero's model, after making sure that it is the same kind of model.

1. Describe and compare (metadata; one exchange). Any difference or failure is the same error on every rank.
2. Give memory to ranks that arrived on the meta device: only rank zero needs the checkpoint's file.
3. Broadcast all parameters and buffers in large buckets.
4. Compare a content digest of every weight, so that what was sent is known to have arrived.

`DistributedDataParallel` alone does part of 3, checks the shapes of trainable parameters only, and compares no
content.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.linear import COMPONENTS
from halfbyte.parallel.agree import CHECK_TIMEOUT_S, agree, together, world_size
from halfbyte.parallel.broadcast import BUCKET_BYTES, broadcast_tensors
from halfbyte.parallel.compare import compare_models
from halfbyte.parallel.describe import named_tensors
from halfbyte.parallel.digests import content_digests
from halfbyte.parallel.materialize import has_meta, materialize


@dataclass(frozen=True)
class SyncReport:
    """What one synchronization cost on this rank."""

    num_tensors: int
    size_bytes: int
    compare_s: float
    broadcast_s: float
    digest_s: float


def synchronize(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout: float = CHECK_TIMEOUT_S,
    bucket_bytes: int = BUCKET_BYTES,
    apart: Collection[str] = (),
) -> SyncReport | None:
    """Check that all ranks hold the same kind of model, and give all of them rank zero's values. None on one process.

    Call it on every rank, once, after the adapter is attached and before `accelerator.prepare`, `Trainer` or
    `DistributedDataParallel` see the model; `halfbyte.parallel.ddp` and `halfbyte train` do.

    group    the data-parallel ranks; None means all.
    device   where a rank on the meta device gets its memory; None means the type of device that rank zero uses.
    timeout  seconds to wait for the other ranks at each comparison.
    apart    tensors, by name, of which each rank holds another part: only their shapes are compared.
    memory   two buckets beyond the model.
    raises   on every rank the same ValueError, naming rank, layer, found and expected, when the models differ or a base
             component could be trained; RuntimeError when a rank failed, is missing, or its bytes did not arrive.
    """
    if world_size(group) == 1:
        return None
    start = time.monotonic()
    description, source = compare_models(model, group=group, timeout=timeout)
    with together("Allocating memory for the model", group=group, timeout=timeout):
        if has_meta(model):
            materialize(model, device or _local_device(source))
    compared = time.monotonic()
    # Sorted by name: the modules of two ranks may have been registered in another order.
    tensors = named_tensors(model)
    names = [name for name in sorted(tensors) if name not in apart and "tied to" not in description.get(name, {})]
    to_send = [tensors[name] for name in names]
    size = broadcast_tensors([t.detach() for t in to_send], group=group, bucket_bytes=bucket_bytes)
    if to_send and to_send[0].is_cuda:
        torch.cuda.synchronize()
    sent = time.monotonic()
    compare_contents(model, group=group, timeout=timeout, apart=apart)
    leave_components_to_us(model)
    done = time.monotonic()
    return SyncReport(len(to_send), size, compared - start, sent - compared, done - sent)


def leave_components_to_us(model: nn.Module) -> None:
    """Tell DDP to leave the packed base alone: it is synchronized, and never trained.

    Otherwise DDP would send it again when it wraps, and its mixed precision would make a cast copy of the bytes.
    torch's documented way to say so is this underscored method (pytorch#43690).
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    ignored |= {f"{fqn}.{name}" for fqn in nvfp4_modules(model) for name in COMPONENTS}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))


def _local_device(device_type: str) -> torch.device:
    return torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def compare_contents(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = CHECK_TIMEOUT_S,
    apart: Collection[str] = (),
) -> None:
    """Step 4. RuntimeError on every rank, naming rank and tensor, when a digest is not the one of rank zero."""
    digests = content_digests(model)
    digests = {name: d for name, d in digests.items() if name not in apart and f"{name}.qdata" not in apart}
    all_digests = agree("Comparing the model's bytes", digests, group=group, timeout=timeout)
    wrong = [
        f"rank {rank}, {name}: digest is {found[name]}, expected {expected}"
        for rank, found in enumerate(all_digests)
        for name, expected in all_digests[0].items()
        if found[name] != expected
    ]
    if wrong:
        raise RuntimeError(
            f"After the broadcast the ranks still differ in {len(wrong)} tensors: {'; '.join(wrong[:5])}. The "
            "bytes were damaged on the way or in memory, or something wrote to the model meanwhile: check the "
            "machine's links and memory."
        )
