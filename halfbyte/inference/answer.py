"""An answer, piece by piece as it comes: prompt or conversation to tokens, and tokens to text.

The decoding loop is transformers' own `generate`, with a streamer that hands each finished piece of text on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.inference.load import Runnable

Messages = list[dict[str, str]]
Emit = Callable[[str], None]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature  0 takes the likeliest token, always the same answer; above, the answer is drawn.
    top_p, top_k draw among the likeliest tokens that make up this share, or among so many; None: among all.
    seed         of the draw; the same seed gives the same answer.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "repetition_penalty": (self.repetition_penalty is None or self.repetition_penalty > 0, "above 0"),
        }
        for name, (right, expected) in limits.items():
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)}, which is out of range; expected {expected}")

    def arguments(self) -> dict[str, Any]:
        """What `generate` takes; nothing is left to the model's own generation_config but its stop tokens."""
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        given["repetition_penalty"] = self.repetition_penalty or 1.0
        if self.temperature > 0:
            given |= {"temperature": self.temperature, "top_p": self.top_p or 1.0, "top_k": self.top_k or 0}
        else:  # unset, so that transformers does not warn of values that do nothing
            given |= {"temperature": None, "top_p": None, "top_k": None}
        return given


def chat_tokens(runnable: Runnable, messages: Messages) -> Any:
    """A conversation by the tokenizer's chat template, ready for the answer. ValueError without a template."""
    if not runnable.tokenizer.chat_template:
        raise ValueError(
            f"{runnable.name}: the tokenizer has no chat template; add chat_template.jinja to the folder, or continue "
            "plain text with `halfbyte generate --raw`"
        )
    return runnable.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def text_tokens(runnable: Runnable, text: str) -> Any:
    """Plain text to be continued."""
    tokens = runnable.tokenizer(text, return_tensors="pt")
    if tokens["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty; there is nothing to continue; give some text")
    return tokens


@torch.no_grad()
def answer(runnable: Runnable, tokens: Any, sampling: Sampling, emit: Emit) -> str:
    """Generate, handing each piece of text to `emit`; returns the whole.

    raises  ValueError when prompt and answer exceed the positions that the model was built for.
    """
    model, tokenizer = runnable.model, runnable.tokenizer
    length = tokens["input_ids"].shape[1]
    check_length(model, length, sampling.max_new_tokens)
    pieces: list[str] = []

    def take(text: str) -> None:
        pieces.append(text)
        if text:
            emit(text)

    torch.manual_seed(sampling.seed)
    model.generate(
        **tokens.to(model.device),
        **sampling.arguments(),
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=stop_tokens(model, tokenizer),
        streamer=text_streamer(tokenizer, take),
    )
    return "".join(pieces)


def text_streamer(tokenizer: Any, take: Emit) -> Any:
    """transformers' streamer, which holds text back until it cannot change, with another end than the screen."""
    from transformers import TextStreamer

    class Handing(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            take(text)

    return Handing(tokenizer, skip_prompt=True, skip_special_tokens=True)


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The model's stop tokens and the tokenizer's: chat models often name only one of the two."""
    named = model.generation_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return sorted({token for token in [*ids, tokenizer.eos_token_id] if token is not None})


def check_length(model: Any, prompt: int, new: int) -> None:
    """ValueError when prompt and answer do not fit the model's positions."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and prompt + new > limit:
        raise ValueError(
            f"the prompt has {prompt} tokens and the answer may have {new}, but the model's limit is {limit} "
            "positions; shorten it, lower --max-new-tokens, or start anew (/reset)"
        )
