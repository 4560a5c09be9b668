"""`halfbyte train CONFIG.yaml [key=value ...]`."""

import os
from typing import Annotated

import typer


def show_keys(value: bool) -> None:
    """Print every key of the config with its default and meaning, and leave."""
    if value:
        from halfbyte.train.config import config_help

        print(config_help())
        raise typer.Exit


def train(
    config: Annotated[str, typer.Argument(help="YAML file; `halfbyte train --keys` lists what may stand in it.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Such as learning_rate=1e-4 or datasets.0.path=more.jsonl.")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", callback=show_keys, is_eager=True, help="List the config's keys and leave.")
    ] = False,
) -> None:
    """Train a LoRA adapter on an NVFP4 base."""
    from halfbyte.cli.quiet import quiet_libraries
    from halfbyte.train.config import load_config

    loaded = load_config(config, overrides or [])
    quiet_libraries()
    from halfbyte.train.trainer import train as run

    result = run(loaded)
    if os.environ.get("RANK", "0") != "0":  # of a launch by torchrun; one process speaks
        return
    if result.loss_before is not None and result.loss_after is not None:
        print(f"held-out loss: {result.loss_before:.4f} before, {result.loss_after:.4f} after {result.step} steps")
    print(f"adapter: {result.adapter}")
