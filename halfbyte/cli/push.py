"""`halfbyte push FOLDER OWNER/NAME`."""

from typing import Annotated

import typer


def push(
    folder: Annotated[str, typer.Argument(help="An adapter's folder, or a model's.")],
    repo_id: Annotated[str, typer.Argument(help="Where on the Hugging Face Hub: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="For your eyes; only when it is created.")] = False,
    card: Annotated[str | None, typer.Option(help="Your own model card, a Markdown file.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The base's Hub id, for the card.")] = None,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print files and card; send nothing.")] = False,
) -> None:
    """Send an adapter or a model to the Hugging Face Hub, with a model card that has its figures."""
    from pathlib import Path

    from halfbyte.checkpoint.card import model_card
    from halfbyte.checkpoint.push import files_to_send, push_folder

    if show:
        for path in files_to_send(Path(folder)):
            print(f"{path.stat().st_size / 1e6:10.2f} MB  {path.relative_to(folder)}")
        print(Path(card).read_text() if card else model_card(Path(folder), base_model))
        return
    where = push_folder(folder, repo_id, private=private, card=card, base_model=base_model, message=message)
    print(f"pushed: {where}")
