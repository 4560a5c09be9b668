"""A training run under DeepSpeed ZeRO on CPU ranks, and its adapter, gathered."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.models import batch, loss_of
from tests.parallel.training import STEPS

# DeepSpeed compiles one small op at its first use. It lives in the virtual environment, apart from any other user's.
VERSIONS = "-".join(importlib.metadata.version(package) for package in ("torch", "deepspeed"))
EXTENSIONS = Path(sys.prefix, "torch_extensions", VERSIONS)
OP = EXTENSIONS / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"


def environment() -> dict[str, str]:
    """What DeepSpeed reads when it is imported."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS), "PATH": path, "DS_LOG_LEVEL": "error"}


def config(stage: int, **zero: Any) -> dict[str, Any]:
    os.environ |= environment()  # before anything imports deepspeed
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **zero},
    }


def initialize(model: nn.Module, settings: dict[str, Any], make_optimizer: Any = None) -> Any:
    """deepspeed.initialize with a client optimizer on the trainable parameters; returns the engine."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters) if make_optimizer else torch.optim.AdamW(parameters, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def take_steps(engine: Any, steps: range = range(STEPS)) -> list[float]:
    """This rank's losses."""
    losses = []
    for step in steps:
        torch.manual_seed(10_000 + 100 * step + dist.get_rank())
        loss = loss_of(engine, batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_base(model: nn.Module) -> dict[str, Tensor]:
    """The packed base's components, whole, by name."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[name] = parameter.detach().clone()
    return found
