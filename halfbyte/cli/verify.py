"""`halfbyte verify A B`."""

from typing import Annotated

import typer

SHOWN = 20


def verify(
    a: Annotated[str, typer.Argument(help="An NVFP4 model folder, in any format.")],
    b: Annotated[str, typer.Argument(help="Another.")],
) -> None:
    """Compare two NVFP4 models across formats; exit code 0 when they are the same, 1 when not."""
    from halfbyte.checkpoint.verify import verify as compare

    verdict = compare(a, b)
    for name, what in list(verdict.notes.items())[:SHOWN]:
        print(f"note: {name}: {what}")
    if len(verdict.notes) > SHOWN:
        print(f"... and {len(verdict.notes) - SHOWN} more notes")
    for name, what in list(verdict.differences.items())[:SHOWN]:
        print(f"differs: {name}: {what}")
    if len(verdict.differences) > SHOWN:
        print(f"... and {len(verdict.differences) - SHOWN} more")
    print(f"{'the same' if verdict.same else 'NOT the same'}: {verdict.num_compared} weights and tensors compared")
    raise typer.Exit(0 if verdict.same else 1)
