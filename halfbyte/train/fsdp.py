"""`fsdp: true` of a run: FSDP2 shards the base and the adapter, and tells the trainer how to step and keep them.

Rejected: Accelerate's FSDP plugin, which is for GPUs alone, reads the weights on every rank unless transformers loads
them, and keeps its checkpoints as warnings allow. docs/engines.md says how a script of one's own can use it.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from halfbyte.parallel.fsdp2 import clip_grad_norm, fsdp2
from halfbyte.parallel.mesh import data_mesh
from halfbyte.parallel.sharded_checkpoint import load_sharded, write_state
from halfbyte.train.config import TrainConfig
from halfbyte.train.states import SHARDED, unwrapped

LOAD_TIMEOUT_S = 3600.0  # ranks without weights wait this long for the one that reads them


def shard(config: TrainConfig, model: Any, device: torch.device) -> tuple[Any, "FsdpEngine"]:
    """A PeftModel with its weights on rank 0 alone, sharded over the launch as the config says."""
    mesh = data_mesh(device.type, replicate=config.dp_replicate_size)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.fsdp_config.offload_params else None
    reshard = config.fsdp_config.reshard_after_forward
    fsdp2(model, mesh, offload_policy=offload, reshard_after_forward=reshard, timeout=LOAD_TIMEOUT_S)
    return model, FsdpEngine(model, mesh)


class FsdpEngine:
    """`Engine` of a PeftModel that `fully_shard` has sharded in place: every rank gets batches of its own."""

    def __init__(self, model: Any, mesh: DeviceMesh):
        self.model, self.mesh = model, mesh
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        return model

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.model, max_norm, self.mesh)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """With `torch.distributed.checkpoint`, for any number of ranks to read."""
        write_state(folder / SHARDED, self.model, unwrapped(optimizer))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        load_sharded(folder / SHARDED, self.model, unwrapped(optimizer))

    def load_adapter(self, folder: Path) -> None:
        """Nothing: the shards that `load_optimizer` reads hold the trainable parameters too."""
