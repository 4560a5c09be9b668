"""Save and load a sharded training state with `torch.distributed.checkpoint`, on any number of ranks.

Only what changes is written: trainable parameters and the optimizer's states, each rank its own shards. The frozen
base stays where it came from. A folder is complete or not there: ranks write into a staging folder, agree that all of
them succeeded, and rank zero renames it. `dcp.save` alone leaves a torn folder when a rank dies.
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
    with together(f"Collecting the state for {folder}", timeout=SAVE_TIMEOUT_S):
        parameters, states = get_state_dict(model, optimizer, options=OPTIONS)
    with together(f"Writing {folder}", timeout=SAVE_TIMEOUT_S):
        try:
            dcp.save({"model": parameters, "optimizer": states, **extra}, checkpoint_id=staging)
        except CheckpointException as error:  # raised on all ranks, and no Exception
            failures = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
            raise RuntimeError(failures) from error
    with together(f"Publishing {folder}", timeout=SAVE_TIMEOUT_S):
        if dist.get_rank() == 0:
            if folder.exists():
                shutil.rmtree(folder)
            os.replace(staging, folder)


def load_sharded(folder: str | Path, model: nn.Module, optimizer: Optimizer, **extra: Any) -> dict[str, Any]:
    """Load what `save_sharded` wrote into a model and optimizer, sharded over as many ranks as there are now.

    extra    the same names as when saving; objects are loaded in place, values are returned.
    raises   FileNotFoundError on every rank when there is no complete checkpoint.
    """
    with together(f"Finding {folder}"):
        if not (Path(folder) / ".metadata").exists():
            raise FileNotFoundError(f"{folder}: no complete sharded checkpoint is there")
    parameters, states = get_state_dict(model, optimizer, options=OPTIONS)
    state = {"model": parameters, "optimizer": states, **extra}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=OPTIONS
    )
    return {name: state[name] for name in extra}
