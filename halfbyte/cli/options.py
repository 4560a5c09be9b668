"""Options that several verbs have, written once: `def verb(device: Device = "auto")`."""

from typing import Annotated

import typer

Base = Annotated[str, typer.Argument(help="A model's folder (NVFP4, merged, dense), or a Hub id.")]
AnyBase = Annotated[bool, typer.Option("--any-base", help="Take the adapter of another base.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]

# How an answer is drawn (halfbyte/inference/answer.py).
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer.")]
Temperature = Annotated[float, typer.Option(help="0: the likeliest token, always. Above: drawn.")]
TopP = Annotated[float | None, typer.Option(help="Draw among the likeliest that make up this share.")]
TopK = Annotated[int | None, typer.Option(help="Draw among so many of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: repeat less.")]
