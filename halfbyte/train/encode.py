"""One example to token ids and labels: which tokens the loss is taken on.

Chat: the loss is on what the assistant says, and on the token that ends its turn. A template with
`{% generation %}` markers says which tokens these are. For every other template (SmolLM2's among them) the turns are
found as text: the conversation up to a turn, and up to its end, must be prefixes of the whole, and a token belongs to
the turn when its characters lie between. Some templates render an earlier turn otherwise once more follows (Qwen3's
drops what was thought); for those TRL carries versions made for training (`get_training_chat_template`), and where it
has none we say so: guessing would train on the user's words. Tokenizing turn by turn was rejected: tokens that merge
across the seam would differ from those seen at inference.

Every encoder returns {"input_ids": [T], "labels": [T]}, labels -100 where no loss is taken.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

IGNORED = -100
Encoded = dict[str, list[int]]
Messages = list[dict[str, Any]]

PROBE: Messages = [{"role": role, "content": text} for text in ("one", "two") for role in ("user", "assistant")]
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)


def chat_encoder(tokenizer: Any) -> Callable[[Messages], Encoded]:
    """The encoder of a list of messages for this tokenizer's template.

    raises   ValueError when the tokenizer has no chat template.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template:
        raise ValueError(
            "the data holds chat messages, but the base's tokenizer has no chat template; add chat_template.jinja to "
            "the base folder, or bring the data as prompt and completion"
        )
    if has_generation_markers(tokenizer.chat_template):
        return lambda messages: encode_by_markers(tokenizer, messages, None)
    try:
        list(assistant_spans(tokenizer, PROBE, tokenizer.apply_chat_template(PROBE, tokenize=False)))
    except ValueError:
        try:
            template = get_training_chat_template(tokenizer)
        except ValueError:
            pass  # unknown to TRL; a conversation of one turn may still be told apart
        else:
            return lambda messages: encode_by_markers(tokenizer, messages, template)
    return lambda messages: encode_by_prefix(tokenizer, messages)


def encode_by_markers(tokenizer: Any, messages: Messages, template: str | None) -> Encoded:
    """Encode with a template that marks the assistant's tokens; None takes the tokenizer's own."""
    encoded = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return _labelled(encoded["input_ids"], encoded["assistant_masks"])


def encode_by_prefix(tokenizer: Any, messages: Messages) -> Encoded:
    """Encode with any template whose rendering of a conversation's start is the start of its rendering."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = list(assistant_spans(tokenizer, messages, text))
    return _encode_spans(tokenizer, text, spans, add_special_tokens=False)


def assistant_spans(tokenizer: Any, messages: Messages, text: str) -> Iterator[tuple[int, int]]:
    """Character ranges of the assistant's turns in the rendered conversation, end-of-turn token included.

    raises   ValueError when a prefix does not hold.
    """
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        until = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not (until.startswith(before) and text.startswith(until)):
            raise ValueError(
                f"the chat template renders message {turn} (assistant) otherwise once more follows, so its tokens "
                "cannot be told apart; use a template with {% generation %} markers, or end examples at that turn"
            )
        # The line break after the end-of-turn token is the template's: generation has stopped before it.
        yield len(before), len(before) + len(until[len(before) :].rstrip())


def encode_completion(tokenizer: Any, prompt: str, completion: str) -> Encoded:
    """Encode prompt + completion + end-of-text, with loss on the last two."""
    text = prompt + completion
    return _ended(tokenizer, _encode_spans(tokenizer, text, [(len(prompt), len(text))], add_special_tokens=True))


def encode_text(tokenizer: Any, text: str) -> Encoded:
    """Encode plain text + end-of-text, with loss everywhere."""
    ids = tokenizer(text)["input_ids"]
    return _ended(tokenizer, {"input_ids": ids, "labels": list(ids)})


def alpaca_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of the Alpaca data set for a row with `instruction` and, maybe, `input`."""
    context = row.get("input") or ""
    return ALPACA.format(
        paired=", paired with an input that provides further context" if context else "",
        instruction=row["instruction"],
        input=f"### Input:\n{context}\n\n" if context else "",
    )


def _encode_spans(tokenizer: Any, text: str, spans: list[tuple[int, int]], *, add_special_tokens: bool) -> Encoded:
    """Encode text once; a token is labelled when some of its characters lie in a span."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} cannot say which characters a token covers; convert it to a fast tokenizer"
        )
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    mask = [
        any(first < end and last > start for start, end in spans) and first < last
        for first, last in encoded["offset_mapping"]
    ]
    return _labelled(encoded["input_ids"], mask)


def _labelled(ids: list[int], mask: list[Any]) -> Encoded:
    return {"input_ids": ids, "labels": [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)]}


def _ended(tokenizer: Any, encoded: Encoded) -> Encoded:
    """Append end-of-text, unless the tokenizer has done so; the model must learn to stop."""
    end = tokenizer.eos_token_id
    if end is not None and (not encoded["input_ids"] or encoded["input_ids"][-1] != end):
        encoded["input_ids"].append(end)
        encoded["labels"].append(end)
    return encoded
