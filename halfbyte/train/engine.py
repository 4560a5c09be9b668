"""How a model that we have parallelized ourselves meets `Trainer`.

An engine says which batches a rank gets, what wraps the model, how gradients are clipped and states are kept;
`EngineAccelerator` passes that on through Accelerate's public methods, and `Trainer` notices nothing. Rejected:
Accelerate's own ParallelismConfig, which knows no tensor parallelism beside DDP, none on a CPU, and asks for DTensors.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn


class Engine(Protocol):
    """A model spread over the ranks of a launch. Made before the trainer, and so before the optimizer.

    data_rank, data_size   this rank gets batch data_rank of every data_size batches; ranks with the same batches are
                           neighbours.
    """

    data_rank: int
    data_size: int

    def wrap(self, model: nn.Module, **ddp_options: Any) -> nn.Module:
        """What training calls in the place of the model; the model itself where it needs no wrapper.

        ddp_options   what `Trainer` would give to DistributedDataParallel.
        """

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """The global norm of the gradients, which are scaled to at most max_norm (may be infinite)."""

    def save_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Write the optimizer's states into a checkpoint's folder, which exists; called on all ranks."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        """Read them back, to the same bits."""

    def load_adapter(self, folder: Path) -> None:
        """Put the adapter of a checkpoint, in PEFT's files, into the model; called on all ranks."""


@contextmanager
def without_parallelism_config() -> Iterator[None]:
    """Hide a launch's parallelism config, which the run follows itself (preflight.py), from Accelerate.

    It would build a mesh of its own from it, deal out batches by that, and refuse CPUs.
    """
    asked = os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    try:
        yield
    finally:
        if asked is not None:
            os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = asked


class EngineAccelerator(Accelerator):
    """Accelerate for such a model: to it, processes are the ranks that get different batches."""

    def __init__(self, engine: Engine, **options: Any):
        self.engine = engine
        super().__init__(**options)

    @property
    def num_processes(self) -> int:
        return self.engine.data_size

    @property
    def process_index(self) -> int:
        return self.engine.data_rank

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Accelerate's placement and autocast, then the engine's wrapper."""
        prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if evaluation_mode:
            return prepared
        return self.engine.wrap(prepared, **(self.ddp_handler.to_kwargs() if self.ddp_handler else {}))

    def gather(self, tensor: Any) -> Any:
        """What ranks with different batches hold, joined along the first dimension."""
        ranks = self.state.num_processes
        copies = ranks // self.engine.data_size

        def distinct(joined: Tensor) -> Tensor:
            return joined.unflatten(0, (ranks, -1))[::copies].flatten(0, 1)

        everyone = super().gather(tensor)
        return everyone if copies == 1 else recursively_apply(distinct, everyone)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """As Accelerate's, over the whole model; parameters are all of its, and the norm is the 2-norm."""
        assert norm_type == 2, norm_type
        self.unscale_gradients()
        return self.engine.clip_grad_norm(max_norm)
