"""memory.json: what a run's memory is made of, in bytes of this rank, measured once after the first optimizer step.

Counted are the tensors themselves: the frozen base, what is trained, its gradients, the optimizer's states. What the
peak holds beyond them is activations, workspace, the libraries and the allocator's slack; nothing in a process can tell
these apart, so they stay one number, of `memory_gb` in the metrics.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from halfbyte.checkpoint.output import write_text
from halfbyte.train.states import unwrapped


class MemoryByKind(TrainerCallback):
    """Writes the file on rank 0. Not for DeepSpeed, whose gradients and states lie in buffers of its own."""

    def __init__(self, path: Path):
        self.path, self._done = path, False

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._done or not state.is_world_process_zero:
            return
        self._done = True
        write_text(self.path, json.dumps(bytes_by_kind(kwargs["model"], kwargs["optimizer"]), indent=1))


def bytes_by_kind(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """base, adapter (all that is trained), gradients, optimizer: bytes of storage, shared ones counted once."""
    params = list(model.parameters())
    trained = [param for param in params if param.requires_grad]
    frozen = [param for param in params if not param.requires_grad]
    return {
        "base": storage_bytes([*frozen, *model.buffers()]),
        "adapter": storage_bytes(trained),
        "gradients": storage_bytes(param.grad for param in trained if param.grad is not None),
        "optimizer": storage_bytes(tensors_in(list(states_of(optimizer).values()))),
    }


def states_of(optimizer: torch.optim.Optimizer) -> Any:
    """Its states, without telling an optimizer of ours that somebody has them: it would look for moves from then on."""
    inner = unwrapped(optimizer)
    return inner.own_state if hasattr(inner, "own_state") else inner.state


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the local shards' storages."""
    storages = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr(), storage.device] = storage.nbytes()
    return sum(storages.values())
