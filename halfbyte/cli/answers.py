"""Answers on the screen: as they come, under each other, or side by side where a terminal is wide enough."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.inference.answer import Sampling
    from halfbyte.inference.compare import Voice
    from halfbyte.inference.load import Runnable

WIDE = 100  # columns of a terminal for two answers beside each other


def show(
    voices: "Sequence[Voice]", tokens_of: "Sequence[Callable[[Runnable], Any]]", sampling: "Sampling"
) -> list[str]:
    """Let each voice answer, and return the answers.

    tokens_of  for each voice, from its tokenizer to the tokens it continues.
    """
    from rich.console import Console

    console = Console()
    if len(voices) > 1 and console.is_terminal and console.width >= WIDE:
        return beside(voices, tokens_of, sampling, console)
    answers = []
    for voice, tokens in zip(voices, tokens_of, strict=True):
        if len(voices) > 1:
            print(f"== {voice.name}", flush=True)
        answers.append(voice.say(tokens, sampling, write))
        print("\n" if len(voices) > 1 else "", flush=True)
    return answers


def write(text: str) -> None:
    """A piece of an answer, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def beside(
    voices: "Sequence[Voice]", tokens_of: "Sequence[Callable[[Runnable], Any]]", sampling: "Sampling", console: Any
) -> list[str]:
    """One column a voice; the one that answers grows."""
    from rich.live import Live
    from rich.table import Table

    texts = [""] * len(voices)

    def table() -> Table:
        made = Table(*(voice.name for voice in voices), expand=True)
        made.add_row(*texts)
        return made

    with Live(table(), console=console, refresh_per_second=8, vertical_overflow="visible") as live:
        for place, voice in enumerate(voices):

            def grow(text: str, place: int = place) -> None:
                texts[place] += text
                live.update(table())

            voice.say(tokens_of[place], sampling, grow)
    return texts
