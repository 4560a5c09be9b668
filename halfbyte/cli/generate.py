"""`halfbyte generate BASE --prompt ...`."""

import sys
from typing import Annotated

import typer

from halfbyte.cli.options import AnyBase, Base, Device, MaxNewTokens, RepetitionPenalty, Temperature, TopK, TopP


def generate(
    base: Base,
    adapter: Annotated[str | None, typer.Option(help="A PEFT adapter's folder, such as RUN/adapter.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to answer; repeatable. Default: standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without chat template.")] = False,
    compare: Annotated[
        str | None, typer.Option(help="Answer with this too: base (no adapter), a model's folder, or another adapter.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    any_base: AnyBase = False,
    device: Device = "auto",
) -> None:
    """Answer prompts with a model, or with two of them."""
    from functools import partial

    from halfbyte.cli.quiet import quiet_transformers
    from halfbyte.inference.answer import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    if raw and system is not None:
        raise ValueError("--raw continues plain text, which has no --system message; leave one of them out")
    prompts = prompt or [from_stdin()]
    quiet_transformers()
    from halfbyte.cli.answers import show
    from halfbyte.inference.answer import chat_tokens, text_tokens
    from halfbyte.inference.compare import voices

    speakers = voices(base, adapter, compare, any_base=any_base, device=device)
    for number, text in enumerate(prompts):
        if len(prompts) > 1:
            print(("\n" if number else "") + f"> {text}", flush=True)
        turn = [{"role": "user", "content": text}]
        messages = turn if system is None else [{"role": "system", "content": system}, *turn]
        make = partial(text_tokens, text=text) if raw else partial(chat_tokens, messages=messages)
        show(speakers, [make] * len(speakers), sampling)


def from_stdin() -> str:
    """The prompt from standard input. ValueError when there is nothing."""
    text = "" if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise ValueError("no prompt; give --prompt 'text', or text on standard input")
    return text
