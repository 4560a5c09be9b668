"""`tensor_parallel_size` of a run: the mesh, and what the trainer must be told about a model that is cut over it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from halfbyte.parallel.mesh import DATA, TENSOR
from halfbyte.parallel.synchronize import synchronize
from halfbyte.parallel.tensor_parallel import clip_grad_norm, part, tensor_parallel
from halfbyte.parallel.tp_layers import cut_factors

TIMEOUT_S = 600.0  # ranks wait this long for each other; the slowest has read and digested its parts by then
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name


def cut(model: Any, mesh: DeviceMesh) -> tuple[Any, "TensorParallelEngine"]:
    """A PeftModel whose base is cut over the mesh (data, tensor): its adapter too, and its copies made equal."""
    tensor_parallel(model, mesh[TENSOR], timeout=TIMEOUT_S)
    synchronize(model, group=mesh[DATA].get_group(), timeout=TIMEOUT_S)
    return model, TensorParallelEngine(model, mesh)


class TensorParallelEngine:
    """`Engine` of a PeftModel cut over the second dimension of a mesh (data, tensor).

    The ranks of a tensor dimension share batches. Over the data dimension it is DDP, where that has several ranks.
    """

    def __init__(self, model: Any, mesh: DeviceMesh):
        self.model, self.mesh = model, mesh
        self.data_rank, self.data_size = mesh[DATA].get_local_rank(), mesh[DATA].size()

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        if self.data_size == 1:
            return model
        return DistributedDataParallel(model, process_group=self.mesh[DATA].get_group(), **ddp_options)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        return clip_grad_norm(self.model, max_norm, self.mesh[TENSOR])

    def save_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """One file for each rank of the tensor dimension: a rank's states belong to its parts of the factors."""
        if self.data_rank == 0:
            torch.save(optimizer.state_dict(), folder / self.optimizer_file)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        # From CPU memory: an optimizer moves its states itself, and torch's AdamW wants its step counts left there.
        optimizer.load_state_dict(torch.load(folder / self.optimizer_file, map_location="cpu", weights_only=True))

    @property
    def optimizer_file(self) -> str:
        tensor = self.mesh[TENSOR]
        return f"optimizer-{tensor.get_local_rank()}-of-{tensor.size()}.pt"

    def load_adapter(self, folder: Path) -> None:
        from peft import set_peft_model_state_dict

        adapter = self.model.active_adapter
        state = load_file(folder / ADAPTER_FILE)
        for name, (dim, _) in cut_factors(self.model).items():
            key = name.replace(f".{adapter}.weight", ".weight")
            state[key] = part(state[key], dim, self.mesh[TENSOR])
        set_peft_model_state_dict(self.model, state, adapter_name=adapter)
