"""What a run notes for its report: memory by kind, how the base was quantized, answers before and after."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from halfbyte import load_model
from halfbyte.train import train
from halfbyte.train.files import BASE, MEMORY, SAMPLES, read_lines
from tests.train import tiny

PROMPTS = ["What is 3 and 3?", "What is 4 and 4?"]


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
    """The same run with prompts (interrupted and resumed) and without: their folders."""
    folder = tmp_path_factory.mktemp("records")
    asked = {"sample_prompts": PROMPTS, "sample_max_new_tokens": 8}
    train(config(folder / "asked", **asked, save_steps=2, max_steps=4, lr_scheduler="constant"))
    train(config(folder / "asked", **asked, max_steps=6, lr_scheduler="constant", resume_from_checkpoint=True))
    train(config(folder / "plain", save_steps=2, max_steps=4, lr_scheduler="constant"))
    return folder / "asked", folder / "plain"


def greedy(model, prompt: str) -> str:
    """Eight tokens by argmax over whole forward passes, no cache, no `generate`."""
    tokenizer = tiny.tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)["input_ids"]
    start = len(ids)
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_answers_are_those_of_the_base_and_of_the_adapter(runs, base) -> None:
    """Also after a resume: the answers before training stay, those of the earlier end are replaced."""
    rows = read_lines(runs[0] / SAMPLES)
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, prompt) for step in (0, 6) for prompt in PROMPTS]
    model = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), runs[0] / "adapter").eval()
    assert [row["answer"] for row in rows[2:]] == [greedy(model, prompt) for prompt in PROMPTS]
    with model.disable_adapter():
        assert [row["answer"] for row in rows[:2]] == [greedy(model, prompt) for prompt in PROMPTS]


def test_answering_leaves_the_run_as_it_is(runs) -> None:
    with_answers, without = (load_file(run / "checkpoint-4" / "adapter_model.safetensors") for run in runs)
    assert (
        all(torch.equal(with_answers[key], without[key]) for key in without) and with_answers.keys() == without.keys()
    )


def test_memory_is_the_bytes_of_the_tensors(runs, base) -> None:
    """Against the files: what is trained is in the adapter's, in fp32; Adam keeps two of each and a step count.

    The base's small layers come as views of scales that torchao pads to 128 rows, which is 2% here.
    """
    found = json.loads((runs[1] / MEMORY).read_text())
    trained = load_file(runs[1] / "adapter" / "adapter_model.safetensors")
    numel = sum(tensor.numel() for tensor in trained.values())
    assert found["adapter"] == found["gradients"] == 4 * numel
    assert found["optimizer"] == 8 * numel + 4 * len(trained)
    model = load_model(base, dtype=torch.float32)
    frozen = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert frozen <= found["base"] < 1.02 * frozen


def test_the_bases_record_comes_along(runs, base) -> None:
    record = json.loads((runs[0] / BASE).read_text())
    assert record == json.loads((base / "halfbyte.json").read_text())
    assert len(record["errors"]) == 15 - 1 and all(0.05 < error < 0.15 for error in record["errors"].values())


def test_prompts_beside_deepspeed_are_refused(config, tmp_path) -> None:
    with pytest.raises(ValueError, match="sample_prompts and deepspeed are both set"):
        config(tmp_path, sample_prompts="hello", deepspeed="zero.json")
