"""Loss masks, checked by decoding what is labelled: exactly the assistant's words and the token that ends its turn."""

import pytest

from halfbyte.train import encode
from tests.train import tiny

TURNS = [
    {"role": "user", "content": "What is the sum?"},
    {"role": "assistant", "content": "It is their total."},
    {"role": "user", "content": "and of a b c?"},
    {"role": "assistant", "content": " c"},
]


def labelled(tokenizer, encoded: encode.Encoded) -> str:
    """The text of the tokens that carry a label; each label is its own token."""
    for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True):
        assert label in (token, encode.IGNORED)
    return tokenizer.decode([label for label in encoded["labels"] if label != encode.IGNORED])


def test_prefixes_give_every_turn_of_the_assistant() -> None:
    tokenizer = tiny.tokenizer(tiny.CHATML)
    encoded = encode.chat_encoder(tokenizer)(TURNS)
    assert encoded["input_ids"] == tokenizer.apply_chat_template(TURNS, return_dict=True)["input_ids"]
    assert labelled(tokenizer, encoded) == "It is their total.<|im_end|> c<|im_end|>"


def test_markers_and_prefixes_agree() -> None:
    marked, plain = tiny.tokenizer(tiny.MARKED), tiny.tokenizer(tiny.MARKED)
    plain.chat_template = tiny.MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert encode.chat_encoder(marked)(TURNS) == encode.chat_encoder(plain)(TURNS)


def test_a_template_that_rewrites_earlier_turns_is_taken_in_trls_version() -> None:
    """Qwen3's template drops earlier thoughts, so its prefixes do not hold; TRL's version for training keeps them."""
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = tiny.tokenizer(qwen3_chat_template)
    text = labelled(tokenizer, encode.chat_encoder(tokenizer)(TURNS))
    assert "It is their total.<|im_end|>" in text and "What is the sum" not in text


def test_a_template_known_to_trl_whose_prefixes_hold_needs_no_other_version() -> None:
    """TRL's marked version of Qwen2.5's template also labels the line break of the generation prompt; ours does not."""
    from trl.chat_template_utils import qwen2_5_chat_template

    tokenizer = tiny.tokenizer(qwen2_5_chat_template)
    assert labelled(tokenizer, encode.chat_encoder(tokenizer)(TURNS)) == "It is their total.<|im_end|> c<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    encoder = encode.chat_encoder(tiny.tokenizer(tiny.FORGETFUL))
    with pytest.raises(ValueError, match="renders message 1 .*otherwise once more follows.*generation"):
        encoder(TURNS)


def test_a_single_turn_is_fine_where_only_earlier_turns_are_rewritten() -> None:
    tokenizer = tiny.tokenizer(tiny.FORGETFUL)
    assert labelled(tokenizer, encode.chat_encoder(tokenizer)(TURNS[:2])) == "hm. It is their total.<|im_end|>"


def test_no_template() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        encode.chat_encoder(tiny.tokenizer(None))


def test_completion_is_labelled_even_where_tokens_merge_across_the_seam() -> None:
    """'th' + 'e' is one token of the tokenizer; it holds a character of the completion, so it is trained on."""
    tokenizer = tiny.tokenizer()
    encoded = encode.encode_completion(tokenizer, "of th", "e sum")
    assert encoded["input_ids"][:-1] == tokenizer("of the sum")["input_ids"]
    assert labelled(tokenizer, encoded) == " the sum<|im_end|>"
    assert labelled(tokenizer, encode.encode_completion(tokenizer, "of ", "")) == "<|im_end|>"


def test_plain_text_is_labelled_whole() -> None:
    tokenizer = tiny.tokenizer()
    assert labelled(tokenizer, encode.encode_text(tokenizer, "the sum")) == "the sum<|im_end|>"


def test_alpaca_prompt_with_and_without_input() -> None:
    bare = encode.alpaca_prompt({"instruction": "Add.", "output": "3"})
    assert bare.endswith("### Instruction:\nAdd.\n\n### Response:\n") and "Input" not in bare
    paired = encode.alpaca_prompt({"instruction": "Add.", "input": "1 2", "output": "3"})
    assert paired.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n") and "paired" in paired
