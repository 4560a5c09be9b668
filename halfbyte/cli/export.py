"""`halfbyte export SRC OUT --format ...`."""

from typing import Annotated

import typer


def export(
    src: Annotated[str, typer.Argument(help="An NVFP4 model folder, or a Hub id.")],
    out: Annotated[str, typer.Argument(help="The folder to write; it appears when it is complete.")],
    format: Annotated[str, typer.Option(help="torchao, compressed-tensors or modelopt.")],
    fuse: Annotated[
        str, typer.Option(help="q/k/v or gate/up with unequal tensor scales: refuse, or rescale their block scales.")
    ] = "refuse",
    activations: Annotated[str, typer.Option(help="keep, or none for a weight-only file.")] = "keep",
    max_shard_size: Annotated[str, typer.Option(help="Largest file, such as 5GB or 300MB.")] = "5GB",
) -> None:
    """Write an NVFP4 model in another format, for another serving engine."""
    from rich.console import Console

    from halfbyte.checkpoint.export import export_checkpoint
    from halfbyte.cli.quantize import progress_bar

    with progress_bar("Exporting") as progress:
        report = export_checkpoint(
            src,
            out,
            format=format,
            fuse=fuse,
            activations=activations,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    console = Console(highlight=False)
    for fqn, change in report.moved_scales.items():
        console.print(f"tensor scale moved by {change:+.1e}: {fqn} (its reciprocal does not return)")
    for fqn, error in report.rescaled.items():
        console.print(f"block scales rescaled, adding a relative error of {error:.2%}: {fqn}")
    for notice in report.notices:
        console.print(f"note: {notice}")
    console.print(f"{report.num_layers} NVFP4 layers written to {out} as {report.format}")
