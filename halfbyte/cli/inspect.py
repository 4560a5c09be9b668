"""`halfbyte inspect PATH`."""

from typing import Annotated

import typer


def inspect(path: Annotated[str, typer.Argument(help="A model's or an adapter's folder, or a Hub id.")]) -> None:
    """Say what a model or an adapter is, and what is suspicious about it."""
    from rich.console import Console
    from rich.table import Table

    from halfbyte.checkpoint.inspect import inspect_path

    found = inspect_path(path)
    table = Table(show_header=False, title=str(path))
    table.add_column()
    table.add_column(overflow="fold")  # a digest must be readable whole
    for name, text in found.facts.items():
        table.add_row(name, text)
    console = Console()
    console.print(table)
    for warning in found.warnings:
        console.print(f"warning: {warning}", highlight=False)
