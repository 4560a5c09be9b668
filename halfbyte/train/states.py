"""Which engine wrote the optimizer's states in a checkpoint, and which runs can read them: asked before weights load.

`Trainer` itself looks for one name, and goes on with fresh states where it finds none.
"""

from pathlib import Path

import torch
from torch import nn

from halfbyte.parallel.sharded_checkpoint import is_complete, load_sharded
from halfbyte.train.config import TrainConfig

WHOLE = "optimizer.pt"  # Trainer's name: one process, and DDP
SHARDED = "optimizer"  # a folder of torch.distributed.checkpoint

# What a checkpoint holds -> what to write to read it
REMEDIES = {
    "one process or DDP": "remove fsdp, deepspeed and tensor_parallel_size",
    "FSDP2": "set fsdp: true, or remove deepspeed and tensor_parallel_size to go on with one process or DDP",
    "DeepSpeed": "set deepspeed to the config it was written with",
    "tensor parallelism": "set tensor_parallel_size to what it was written with",
}


def writer_of(checkpoint: Path) -> str | None:
    """The engine that wrote a checkpoint's optimizer states, as in REMEDIES; None when there are none."""
    if (checkpoint / WHOLE).exists():
        return "one process or DDP"
    if is_complete(checkpoint / SHARDED):
        return "FSDP2"
    if list(checkpoint.glob("global_step*")):
        return "DeepSpeed"
    return "tensor parallelism" if list(checkpoint.glob("optimizer-*-of-*.pt")) else None


def check_states(checkpoint: Path, config: TrainConfig, ranks: int) -> None:
    """ValueError when this run's engine cannot read the optimizer states of a checkpoint."""
    writer = writer_of(checkpoint)
    if writer is None:
        raise ValueError(f"{checkpoint}: holds no optimizer states; choose another checkpoint, or start anew")
    if writer not in readable(config):
        raise ValueError(
            f"{checkpoint}: its optimizer states were written by {writer}, which this run does not read; "
            f"{REMEDIES[writer]}"
        )
    written = len(list(checkpoint.glob("global_step*/*zero_pp_rank_*_optim_states.pt")))
    if written and written != ranks:
        raise ValueError(
            f"{checkpoint}: DeepSpeed wrote it on {written} ranks, and reads it on as many, but {ranks} were started; "
            f"start {written}, or start anew"
        )


def readable(config: TrainConfig) -> set[str]:
    """Whose states a run can read."""
    if config.deepspeed:
        return {"DeepSpeed"}
    if config.tensor_parallel_size > 1:
        return {"tensor parallelism"}
    return {"FSDP2"} if config.fsdp else {"one process or DDP", "FSDP2"}


def load_shards(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What FSDP2 wrote, into a model that nothing shards."""
    load_sharded(checkpoint / SHARDED, model, unwrapped(optimizer))


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
