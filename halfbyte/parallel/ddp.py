"""DistributedDataParallel around a model with a frozen NVFP4 base.

The base is ordinary uint8 tensors, so plain `DistributedDataParallel(model)` trains correctly as well. What `ddp`
adds is the check that all ranks hold the same base, that only rank zero has to load it, and that it travels once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfbyte.parallel.agree import CHECK_TIMEOUT_S
from halfbyte.parallel.synchronize import synchronize


def ddp(
    model: nn.Module,
    *,
    timeout: float = CHECK_TIMEOUT_S,
    device: torch.device | str | None = None,
    **ddp_kwargs: Any,
) -> DistributedDataParallel:
    """Verify, synchronize, wrap: call it on every rank, after the adapter is attached and before the optimizer is made.

    model       on rank zero with its weights; on other ranks with weights (they are overwritten) or on the meta device.
    timeout     seconds to wait for the other ranks in the check.
    device      where a rank on the meta device gets its memory; None means the type of device that rank zero uses.
    ddp_kwargs  as for DistributedDataParallel; a `process_group` or `device_mesh` there is the one that is checked.
    raises      as `synchronize`, on every rank; RuntimeError when no process group exists.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "ddp needs a process group, and none is initialized. Start the script with torchrun and call "
            "torch.distributed.init_process_group() first."
        )
    group = ddp_kwargs.get("process_group")
    if group is None and ddp_kwargs.get("device_mesh") is not None:
        group = ddp_kwargs["device_mesh"].get_group(mesh_dim=0)
    synchronize(model, group=group, timeout=timeout, device=device)
    # Everything that DDP would check and send at its start has been checked and sent.
    return DistributedDataParallel(model, **{"init_sync": False} | ddp_kwargs)
