"""`halfbyte eval BASE --data heldout.jsonl`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfbyte.cli.options import AnyBase, Base, Device

if TYPE_CHECKING:
    from halfbyte.inference.evaluate import HeldOut


def eval(
    base: Base,
    adapter: Annotated[str | None, typer.Option(help="A PEFT adapter's folder; base and both are evaluated.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Held-out data, as in a config's datasets; several are joined.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval (pip install lm-eval), separated by commas.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None,
    sequence_len: Annotated[int, typer.Option(min=1, help="Cut examples of --data to this many tokens.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per forward pass.")] = 8,
    any_base: AnyBase = False,
    device: Device = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Held-out loss and perplexity, as training reports them; or lm-eval's tasks."""
    from halfbyte.cli.quiet import quiet_libraries

    if not data and not tasks:
        raise ValueError("nothing to evaluate; give --data heldout.jsonl, or --tasks of lm-eval")
    if tasks:
        from halfbyte.inference.tasks import check_installed

        check_installed()
    quiet_libraries()
    from halfbyte.inference.load import load_runnable, pick_device

    pick_device(device)
    from rich.console import Console

    losses: list[HeldOut] = []
    scores: dict[str, Any] = {}
    with Console(stderr=True).status(f"loading {base}") as status:  # on a terminal only
        runnable = load_runnable(base, adapter, any_base=any_base, device=device)
        if data:
            from halfbyte.inference.evaluate import evaluation_config, held_out
            from halfbyte.train.config import DatasetConfig

            status.update("base and adapter on the held-out data" if adapter else "the held-out data")
            sources = [DatasetConfig(path=path) for path in data]
            config = evaluation_config(sources, sequence_len=sequence_len, batch_size=batch_size, device=device)
            losses = held_out(runnable, config)
        if tasks:
            from halfbyte.inference.tasks import run_tasks

            status.update(tasks)
            scores = run_tasks(runnable, tasks.split(","), limit=limit, batch_size=batch_size)
    print_json(losses, scores) if json else print_tables(losses, scores)


def print_json(losses: "list[HeldOut]", scores: dict[str, Any]) -> None:
    import dataclasses
    import json

    rows = [{**dataclasses.asdict(each), "perplexity": each.perplexity} for each in losses]
    print(json.dumps({"held_out": rows, "tasks": scores}, indent=1, default=str))


def print_tables(losses: "list[HeldOut]", scores: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if losses:
        cut = f", {losses[0].num_cut:,} cut" if losses[0].num_cut else ""
        title = f"{losses[0].examples:,} examples, {losses[0].tokens:,} predicted tokens{cut}"
        table = Table("model", "held-out loss, nats per token", "perplexity", title=title)
        for each in losses:
            table.add_row(each.name, f"{each.loss:.4f}", f"{each.perplexity:.2f}")
        console.print(table)
    if scores:
        table = Table("task", "metric", "value", title="lm-eval")
        for task, metrics in scores.items():
            for metric, value in metrics.items():
                table.add_row(task, metric, f"{value:.4f}" if isinstance(value, float) else str(value))
        console.print(table)
