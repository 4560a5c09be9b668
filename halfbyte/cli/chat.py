"""`halfbyte chat BASE [ADAPTER]`."""

import sys
from typing import Annotated

import typer

from halfbyte.cli.options import AnyBase, Base, Device, MaxNewTokens, RepetitionPenalty, Temperature, TopK, TopP

HELP = "An empty line or the end of input leaves; /reset forgets the conversation."


def chat(
    base: Base,
    adapter: Annotated[str | None, typer.Argument(help="A PEFT adapter's folder, such as RUN/adapter.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Talk to this too: base (no adapter), a model's folder, or another adapter.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[int, typer.Option(help="Of the draw; each turn has its own.")] = 0,
    any_base: AnyBase = False,
    device: Device = "auto",
) -> None:
    """Talk to a model, or to two of them at once."""
    from dataclasses import replace
    from functools import partial

    from halfbyte.cli.quiet import quiet_transformers
    from halfbyte.inference.answer import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    quiet_transformers()
    from halfbyte.cli.answers import show
    from halfbyte.inference.answer import Messages, chat_tokens
    from halfbyte.inference.compare import voices

    speakers = voices(base, adapter, compare, any_base=any_base, device=device)
    first: Messages = [] if system is None else [{"role": "system", "content": system}]
    histories = [list(first) for _ in speakers]
    for speaker in speakers:  # a missing template is met before the first question
        chat_tokens(speaker.runnable, [*first, {"role": "user", "content": "?"}])
    if sys.stdin.isatty():
        print(HELP)
    turn = 0
    while (said := ask()) is not None:
        if said == "/reset":
            histories = [list(first) for _ in speakers]
            continue
        for history in histories:
            history.append({"role": "user", "content": said})
        makers = [partial(chat_tokens, messages=history) for history in histories]
        answers = show(speakers, makers, replace(sampling, seed=seed + turn))
        for history, text in zip(histories, answers, strict=True):
            history.append({"role": "assistant", "content": text})
        turn += 1


def ask() -> str | None:
    """The next line, with a prompt where someone types; None at an empty line or the end."""
    try:
        said = input("\nyou> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return said or None
