"""Streaming, sampling, comparing; against transformers' own `generate` without a streamer."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from halfbyte import load_model
from halfbyte.inference.answer import Sampling, answer, chat_tokens, text_tokens
from halfbyte.inference.compare import voices
from halfbyte.inference.load import load_runnable
from tests.train import tiny

CHAT = [{"role": "user", "content": "What is the sum?"}]


@pytest.fixture(scope="module")
def runnable(base):
    return load_runnable(str(base), device="cpu")


def test_pieces_add_up_to_what_generate_makes(base, runnable) -> None:
    """Greedy, against the plain call on a model loaded on its own."""
    pieces: list[str] = []
    found = answer(runnable, chat_tokens(runnable, CHAT), Sampling(max_new_tokens=12), pieces.append)
    tokenizer = tiny.tokenizer()
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = load_model(base, dtype=torch.float32)
    made = model.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    expected = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found == "".join(pieces) == expected and expected
    assert len(pieces) > 1


def test_a_drawn_answer_depends_on_its_seed_alone(runnable) -> None:
    drawn = Sampling(max_new_tokens=8, temperature=2.0, top_p=0.99, top_k=100, seed=1)
    tokens = chat_tokens(runnable, CHAT)
    first, again, other = (answer(runnable, tokens, s, len) for s in (drawn, drawn, replace(drawn, seed=2)))
    assert first == again != other
    likeliest = replace(drawn, top_k=1)
    assert answer(runnable, tokens, likeliest, len) == answer(runnable, tokens, Sampling(max_new_tokens=8), len)


def test_stops_at_the_end_of_turn(runnable, monkeypatch) -> None:
    """The token that the tokenizer calls the end, though the model names another."""
    tokens = text_tokens(runnable, "the sum of")
    long = answer(runnable, tokens, Sampling(max_new_tokens=10), len)
    ending = tiny.tokenizer()
    ending.eos_token = ending.tokenize(long)[0]
    monkeypatch.setattr(runnable.model.generation_config, "eos_token_id", [0])
    assert len(answer(replace(runnable, tokenizer=ending), tokens, Sampling(max_new_tokens=10), len)) < len(long)


def test_base_and_adapter_share_a_model_and_differ(base, adapter) -> None:
    """`--compare base` switches the adapter off; both equal what PEFT's own loading says."""
    one, two = voices(str(base), str(adapter), "base", device="cpu")
    assert one.runnable is two.runnable and (one.name, two.name) == (str(base), str(adapter))
    said = [
        voice.say(lambda runnable: chat_tokens(runnable, CHAT), Sampling(max_new_tokens=10), len)
        for voice in (one, two)
    ]
    tokens = chat_tokens(one.runnable, CHAT)
    plain = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), adapter).eval()
    with plain.disable_adapter():
        before = plain.generate(**tokens, max_new_tokens=10, do_sample=False)
    after = plain.generate(**tokens, max_new_tokens=10, do_sample=False)
    start = tokens["input_ids"].shape[1]
    decoded = [tiny.tokenizer().decode(ids[0, start:], skip_special_tokens=True) for ids in (before, after)]
    assert said == decoded and said[0] != said[1]


def test_compare_with_a_model_and_with_an_adapter(base, adapter, other) -> None:
    pair = voices(str(base), None, str(other), device="cpu")
    assert [voice.runnable.with_adapter for voice in pair] == [False, False]
    pair = voices(str(base), None, str(adapter), device="cpu")
    assert [voice.runnable.with_adapter for voice in pair] == [False, True]


def test_refusals(base, adapter, other, runnable, tmp_path) -> None:
    for arguments, error, message in (
        ((str(other), str(adapter)), ValueError, "trained on another base"),
        ((str(adapter),), ValueError, "found an adapter, expected a model"),
        ((str(base), str(other)), FileNotFoundError, "found a model, expected a PEFT adapter"),
        ((str(base), str(tmp_path)), FileNotFoundError, "found no adapter_config.json"),
        ((str(tmp_path / "nowhere"),), FileNotFoundError, "no such file or folder"),
    ):
        with pytest.raises(error, match=message):
            load_runnable(*arguments, device="cpu")
    assert load_runnable(str(other), str(adapter), any_base=True, device="cpu").with_adapter
    with pytest.raises(ValueError, match="compared with itself"):
        voices(str(base), None, "base")
    with pytest.raises(ValueError, match="limit is 256 positions"):
        answer(runnable, chat_tokens(runnable, CHAT), Sampling(max_new_tokens=250), len)
    with pytest.raises(ValueError, match="prompt is empty"):
        text_tokens(runnable, "")
    bare = replace(runnable, tokenizer=tiny.tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="no chat template.*--raw"):
        chat_tokens(bare, CHAT)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"max_new_tokens": 0}]
)
def test_sampling_out_of_range(wrong) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .* out of range"):
        Sampling(**wrong)
