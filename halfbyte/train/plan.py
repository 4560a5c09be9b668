"""A run's plan: its config in the planner's words, and the refusal of a run that cannot fit.

The planner may be wrong by some percent, and what it does not know of (a second process, fragments) only makes matters
worse; so a run is refused when nine tenths of its plan exceed all the memory there is, and never for less.
"""

import os
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint.skeleton import load_config
from halfbyte.parallel.deepspeed import read_deepspeed_config, stage_of
from halfbyte.plan.choose import choose, option, options, remedy
from halfbyte.plan.engine import Engine, Kind
from halfbyte.plan.machine import gpu_bytes, host_bytes
from halfbyte.plan.memory import Memory, plan_memory
from halfbyte.plan.read import read_shape
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape
from halfbyte.plan.table import gigabytes, headline, parts_table, yaml_lines
from halfbyte.train.config import TrainConfig

CERTAIN = 0.9  # of the plan


def settings_of(config: TrainConfig, device: str, *, longest: int | None = None) -> Settings:
    """The planner's settings of a run on "cuda" or "cpu".

    longest  tokens of the longest example, where the data are known: shorter ones are not padded to sequence_len.
    """
    bf16 = device == "cuda" if config.bf16 == "auto" else config.bf16
    packing = config.sample_packing
    length = config.sequence_len if longest is None or packing else min(longest, config.sequence_len)
    targets = config.lora_target_modules
    return Settings(
        micro_batch_size=config.micro_batch_size,
        sequence_len=length,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        gradient_checkpointing=config.gradient_checkpointing,
        lora_r=config.lora_r,
        lora_dropout=config.lora_dropout,
        lora_target_modules=targets if isinstance(targets, str) else tuple(targets),
        lora_modules_to_save=tuple(config.lora_modules_to_save or ()),
        optimizer=config.optimizer,
        bf16=bf16,
        device=device,
        forward="merge-aware" if config.merge_aware else "fused",
        padded=True if packing else None,
    )


def engine_of(config: TrainConfig, ranks: int) -> Engine:
    """The engine that a run of this many processes uses."""
    if config.fsdp:
        return Engine(
            "fsdp2", ranks, replicas=config.dp_replicate_size, reshard=config.fsdp_config.reshard_after_forward
        )
    if config.deepspeed:
        kinds: tuple[Kind, ...] = ("ddp", "zero1", "zero2", "zero3")
        return Engine(kinds[stage_of(read_deepspeed_config(config.deepspeed))], ranks)
    data = max(1, ranks // config.tensor_parallel_size)
    return Engine("ddp" if data > 1 else "one", data, config.tensor_parallel_size)


def check_fits(config: TrainConfig, folder: Path, device: torch.device, longest: int, ranks: int) -> None:
    """Print the plan of a run, in short; rank 0 calls it, before any weight is read.

    raises  ValueError with the remedy, when the run cannot fit the memory of the GPU or the host.
    """
    settings = settings_of(config, device.type, longest=longest)
    try:
        shape = read_shape(load_config(folder), folder, settings)
        engine = engine_of(config, ranks)
        memory = plan_memory(shape, settings, engine)
    except ValueError:
        return  # a model whose blocks the planner cannot tell apart; whatever else is wrong is found later
    available = gpu_bytes() if device.type == "cuda" else host_bytes()
    show(shape, settings, engine, memory, available)
    offloads = config.fsdp_config.offload_params or bool(config.deepspeed)
    processes = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if available is not None and not offloads and CERTAIN * memory.peak * processes > available:
        raise ValueError(refusal(shape, settings, engine, memory, available / processes))


def show(shape: ModelShape, s: Settings, engine: Engine, memory: Memory, available: int | None) -> None:
    """The headline and the parts of the memory."""
    from rich.console import Console

    place = "on each GPU" if s.device == "cuda" else "on the CPU"
    of = f" of {gigabytes(available)} GB" if available is not None else ""
    console = Console()
    console.print(headline(shape, s), highlight=False, soft_wrap=True)
    console.print(parts_table(memory, f"Plan, {engine.name}: GB {place}{of}", host=s.device == "cpu"))


def refusal(shape: ModelShape, s: Settings, engine: Engine, memory: Memory, available: float) -> str:
    """Found, expected, and what to change: the first setting that fits, or what the least would need."""
    device = "each GPU" if s.device == "cuda" else "this machine"
    text = (
        f"the run needs about {gigabytes(memory.peak)} GB ({memory.where}), but {device} has "
        f"{gigabytes(available)} GB. "
    )
    found = options(shape, s, engine.ranks, available) if s.device == "cuda" else on_host(shape, s, engine, available)
    taken = choose(found)
    if taken is None:
        return text + remedy(shape, s, engine.ranks, available)
    peak = plan_memory(shape, taken.settings, taken.engine).peak
    return f"{text}This needs {gigabytes(peak)} GB: {', '.join(yaml_lines(taken))}"


def on_host(shape: ModelShape, s: Settings, engine: Engine, available: float) -> list[Any]:
    """The same engine with and without checkpointing."""
    from dataclasses import replace

    return [option(shape, replace(s, gradient_checkpointing=on), engine, available) for on in (False, True)]
