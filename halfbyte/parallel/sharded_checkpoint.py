"""Save and load a sharded training state with `torch.distributed.checkpoint`, on any number of ranks.

Only what changes is written: trainable parameters and the optimizer's states, each rank its own shards. The frozen
base stays where it came from. A folder is complete or not there: ranks write into a staging folder, agree that all of
them succeeded, and rank zero renames it; an older one is renamed first and deleted last, and is found under that name
by a run that follows a kill between the two. `dcp.save` alone leaves a torn folder when a rank dies.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from halfbyte.parallel.agree import together

SAVE_TIMEOUT_S = 600.0
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def save_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer, **extra: Any) -> None:
    """Write trainable parameters, optimizer states and `extra` (objects with state_dict, or values) to a folder.

    Call it on every rank. An older folder of that name is replaced when the new one is complete.
    raises  on every rank when one could not write; the older folder is then as it was.
    """
    folder = Path(folder)
    staging = folder.with_name(folder.name + ".unfinished")
    with together("Clearing the staging folder", timeout=SAVE_TIMEOUT_S):
        if dist.get_rank() == 0:
            shutil.rmtree(staging, ignore_errors=True)
    write_state(staging, model, optimizer, **extra)
    with together(f"Publishing {folder}", timeout=SAVE_TIMEOUT_S):
        if dist.get_rank() == 0:
            publish(staging, folder)


def write_state(folder: Path, model: nn.Module, optimizer: Optimizer, **extra: Any) -> None:
    """`save_sharded` straight into a folder, for a caller that stages it among other files."""
    with together(f"Collecting the state for {folder}", timeout=SAVE_TIMEOUT_S):
        parameters, states = get_state_dict(model, optimizer, options=OPTIONS)
    with together(f"Writing {folder}", timeout=SAVE_TIMEOUT_S):
        try:
            dcp.save({"model": parameters, "optimizer": states, **extra}, checkpoint_id=folder)
        except CheckpointException as error:  # raised on all ranks, and no Exception
            failures = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
            raise RuntimeError(failures) from error


def publish(staging: Path, folder: Path) -> None:
    """Put a complete folder in the place of an older one."""
    replaced = replaced_by(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(folder, replaced)
    os.replace(staging, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def replaced_by(folder: Path) -> Path:
    """Where the older folder of that name lies while the new one takes its place."""
    return folder.with_name(folder.name + ".replaced")


def is_complete(folder: Path) -> bool:
    """Whether `torch.distributed.checkpoint` has finished writing there: its index is written last."""
    return (folder / ".metadata").exists()


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer, **extra: Any) -> dict[str, Any]:
    """Load what `save_sharded` wrote into a model and optimizer, sharded over as many ranks as there are now.

    extra    the same names as when saving; objects are loaded in place, values are returned.
    raises   FileNotFoundError on every rank when there is no complete checkpoint.
    """
    folder = Path(folder)
    with together(f"Finding {folder}"):
        if not folder.exists() and is_complete(replaced_by(folder)):  # a kill came between two renames
            folder = replaced_by(folder)
        if not is_complete(folder):
            raise FileNotFoundError(
                f"{folder}: no complete sharded checkpoint is there; give a folder that save_sharded has finished"
            )
    parameters, states = get_state_dict(model, optimizer, options=OPTIONS)
    state = {"model": parameters, "optimizer": states, **extra}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=OPTIONS
    )
    return {name: state[name] for name in extra}
