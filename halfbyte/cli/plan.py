"""`halfbyte plan CONFIG [key=value ...]`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halfbyte.plan.choose import Option
    from halfbyte.plan.settings import Settings
    from halfbyte.plan.shape import ModelShape
    from halfbyte.train.config import TrainConfig

YAML = (".yaml", ".yml")
LEAST_GPU = 10**8  # bytes: below, somebody left the unit out


def plan(
    config: Annotated[
        str, typer.Argument(help="A model's folder, its config.json alone, a Hub id, or a training config (YAML).")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Keys of the training config, such as sequence_len=4096 lora_r=64.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many, over all hosts.")] = 1,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Of each, such as 24GB. Default: this machine's GPU, if it has one.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Plan a run on this machine's CPU instead.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in bytes.")] = False,
) -> None:
    """Say what a run needs before anything is loaded: memory, disk, network, and which settings fit."""
    from halfbyte.checkpoint.shard_writer import parse_size
    from halfbyte.checkpoint.skeleton import load_config
    from halfbyte.cli.quiet import quiet_transformers
    from halfbyte.plan.choose import options
    from halfbyte.plan.machine import gpu_bytes, host_bytes
    from halfbyte.plan.read import read_shape
    from halfbyte.plan.where import config_place
    from halfbyte.train.plan import settings_of

    quiet_transformers()
    run = training_config(config, overrides or [])
    if cpu and (gpus > 1 or gpu_memory is not None):
        raise ValueError("--cpu plans a run on this machine's CPU; leave out --gpus and --gpu-memory")
    settings = settings_of(run, "cpu" if cpu else "cuda")
    where = config_place(run.base_model)
    shape = read_shape(load_config(where), where, settings)
    if not shape.packed_params:
        raise ValueError(
            f"{run.base_model}: no layer of {shape.name} can be packed in 4 bits; nothing to plan; take another model"
        )
    size = parse_size(gpu_memory) if gpu_memory is not None else gpu_bytes()
    if gpu_memory is not None and parse_size(gpu_memory) < LEAST_GPU:
        raise ValueError(f"--gpu-memory {gpu_memory} is less than any GPU has; a plain number is bytes. Say 24GB.")
    available = host_bytes() if cpu else size
    found = options(shape, settings, gpus, available)
    if json:
        print_json(shape, settings, found)
    else:
        again = " ".join([config, *(overrides or [])]) if config.endswith(YAML) else "run.yaml"
        print_plan(shape, settings, found, gpus, available, again)


def training_config(path: str, overrides: list[str]) -> "TrainConfig":
    """The run to plan: a YAML file's, or the defaults for a model, with overrides."""
    from halfbyte.train.config import apply_override, build_config
    from halfbyte.train.config import load_config as load_run

    if path.endswith(YAML):
        return load_run(path, overrides)
    values: dict[str, Any] = {"base_model": path, "datasets": ["data.jsonl"], "output_dir": "run"}
    for override in overrides:
        apply_override(values, override)
    return build_config(values, source="overrides")


def print_plan(
    shape: "ModelShape", settings: "Settings", found: "list[Option]", gpus: int, available: float | None, run: str
) -> None:
    """Parts, every engine, disk, and what to take."""
    from rich.console import Console

    from halfbyte.plan import table
    from halfbyte.plan.choose import HOST, choose, remedy
    from halfbyte.plan.disk import plan_disk
    from halfbyte.plan.memory import plan_memory

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(table.headline(shape, settings))
    taken = choose(found) if available is not None else None
    shown = taken or found[0]
    memory = plan_memory(shape, shown.settings, shown.engine)
    checkpointing = "with" if shown.settings.gradient_checkpointing else "without"
    title = f"One rank, {shown.engine.name}, {checkpointing} checkpointing"
    console.print(table.parts_table(memory, title, host=settings.device == "cpu"))
    console.print(table.options_table(found, available, host=settings.device == "cpu"))
    say(table.disk_line(plan_disk(shape, settings)))
    for note in shape.notes:
        say(f"note: {note}")
    if available is None:
        say("Which of these fit: give --gpu-memory, such as 24GB.")
    elif taken is None:
        say(f"Nothing fits. {remedy(shape, settings, gpus, available)}")
    else:
        say(f"\nTake {taken.engine.name}. In the training config:\n")
        say("\n".join(table.yaml_lines(taken)))
        say(f"\nand start it with:\n\n{table.launch_line(gpus, HOST, run)}")


def print_json(shape: "ModelShape", settings: "Settings", found: "list[Option]") -> None:
    """Everything in bytes, for other programs."""
    import dataclasses
    import json

    from halfbyte.plan.disk import plan_disk

    rows = [
        {
            "engine": each.engine.name,
            "gradient_checkpointing": each.settings.gradient_checkpointing,
            **dataclasses.asdict(each.memory),
            "sent_a_step": each.network,
            "fits": each.fits,
            "largest_micro_batch": each.largest_batch,
        }
        for each in found
    ]
    model = {
        "model": shape.name,
        "params": shape.params,
        "packed_params": shape.packed_params,
        "trainable_params": shape.trainable_params,
        "disk": dataclasses.asdict(plan_disk(shape, settings)),
        "notes": shape.notes,
    }
    print(json.dumps({**model, "options": rows}, indent=1))
