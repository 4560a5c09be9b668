"""`halfbyte quantize SRC OUT`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halfbyte.checkpoint.quantize import Progress, QuantizeReport


def quantize(
    src: Annotated[str, typer.Argument(help="A bf16, fp16 or fp32 model folder, a Hub id, or a .gguf file.")],
    out: Annotated[str, typer.Argument(help="The folder to write; it appears when it is complete.")],
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave layers dense whose name, or its last part, matches: 'model.layers.0.*', o_proj. Repeatable."
        ),
    ] = None,
    scales: Annotated[
        str, typer.Option(help="max, or four-over-six: map each block's maximum to 6 or to 4, whichever errs less.")
    ] = "max",
    activations: Annotated[str, typer.Option(help="none (weight-only) or dynamic (W4A4).")] = "none",
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Quantize the output layer too.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB or 300MB.")] = "5GB",
) -> None:
    """Turn a dense checkpoint or a GGUF file into an NVFP4 one."""
    from halfbyte.checkpoint.quantize import quantize_checkpoint

    with progress_bar("Quantizing") as progress:
        report = quantize_checkpoint(
            src,
            out,
            exclude=exclude or [],
            scales=scales,
            activations=activations,
            lm_head=lm_head,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    print_report(report, out)


@contextmanager
def progress_bar(title: str) -> "Iterator[Progress]":
    """A bar in bytes on stderr, fed by `Progress` calls; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def print_report(report: "QuantizeReport", out: str) -> None:
    """Layers that stayed dense, then the closing table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for fqn, reason in sorted(report.dense.items()):
        console.print(f"stays dense: {fqn} ({reason})", highlight=False)
    table = Table("", "", show_header=False, title=f"NVFP4 in {out}")
    table.add_row("layers in NVFP4", str(len(report.layers)))
    table.add_row("linear layers left dense", str(len(report.dense)))
    table.add_row("size before", f"{report.size_before / 1e6:.1f} MB")
    table.add_row("size after", f"{report.size_after / 1e6:.1f} MB")
    table.add_row("relative error, mean", f"{report.mean_error:.4f}")
    table.add_row("relative error, worst", f"{report.worst.error:.4f} ({report.worst.fqn})")
    if report.scales != "max":
        plain = [layer.plain_error for layer in report.layers]
        table.add_row("the same with plain scales, mean", f"{sum(plain) / len(plain):.4f}")
        table.add_row("the same with plain scales, worst", f"{max(plain):.4f}")
    console.print(table)
