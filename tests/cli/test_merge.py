"""`halfbyte merge` from the command line: the table, the held-out losses, the refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.cli.main import main
from halfbyte.cli.merge import encoded_examples, held_out_loss, loss_check, losses_with_and_without
from tests.train import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("merge")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.model_config(), dtype=torch.float32)
    model.save_pretrained(root / "dense")
    tiny.tokenizer().save_pretrained(root / "dense")
    quantize_checkpoint(root / "dense", root / "base")
    return root / "base"


@pytest.fixture(scope="module")
def data(base: Path) -> Path:
    return tiny.write_lines(base.parent / "rows.jsonl", tiny.chat_rows(12))


@pytest.fixture(scope="module")
def adapter(base: Path, data: Path) -> Path:
    """Trained for a few steps on the data themselves, so that there is a gain to keep."""
    from peft import LoraConfig, get_peft_model

    examples = encoded_examples(str(data), tiny.tokenizer(), 128)
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(load_model(base), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(24):
        example = {key: torch.tensor([values]) for key, values in examples[step % len(examples)].items()}
        model(**example).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(base.parent / "adapter")
    return base.parent / "adapter"


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


def test_table_and_losses(tmp_path: Path, base: Path, adapter: Path, data: Path, capsys: Any) -> None:
    assert run("merge", base, adapter, tmp_path / "out", "--eval", data, "--eval-sequence-len", 128) == 0
    text = capsys.readouterr().out
    assert "all, by size of change" in text and "rounding dither, block scales keep, seed 0" in text
    before, with_adapter, after = (
        float(part.rpartition(" ")[2]) for part in text.partition("held-out loss: ")[2].split("\n")[0].split(",")
    )
    assert with_adapter < before and before - after > 0.85 * (before - with_adapter)


def test_a_merge_aware_adapter_is_measured_as_trained(tmp_path: Path, base: Path, data: Path, capsys: Any) -> None:
    """With its merged weights: rounded as it was trained, the file's loss is the adapter's, whatever it has learned."""
    from peft import LoraConfig, get_peft_model

    from halfbyte.lora import make_merge_aware, save_adapter

    config = LoraConfig(r=8, lora_alpha=1, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    save_adapter(make_merge_aware(get_peft_model(load_model(base), config), seed=5), tmp_path / "adapter")
    assert run("merge", base, tmp_path / "adapter", tmp_path / "out", "--eval", data, "--eval-sequence-len", 128) == 0
    shown = capsys.readouterr()
    before, trained, after = (
        float(part.rpartition(" ")[2]) for part in shown.out.partition("held-out loss: ")[2].split("\n")[0].split(",")
    )
    assert trained == after != before
    if trained > before:  # random factors
        assert "does not better the base" in " ".join(shown.err.split())


def test_only_the_worst_layers_are_shown(tmp_path: Path, base: Path, adapter: Path, capsys: Any) -> None:
    """And all of them on request, and in the record."""
    assert run("merge", base, adapter, tmp_path / "a") == 0
    short = capsys.readouterr().out
    assert run("merge", base, adapter, tmp_path / "b", "--verbose") == 0
    whole = capsys.readouterr().out
    layers = json.loads((tmp_path / "a" / "halfbyte.json").read_text())["layers"]
    assert whole.count("nvfp4") == len(layers) > 5 == short.count("nvfp4")
    least = min(layers, key=lambda name: layers[name]["kept"])
    assert f"{layers[least]['kept']:.1%}" in short
    assert f"the 5 of {len(layers)} layers that kept least; --verbose" in short and "--verbose" not in whole


def test_lost_adapter_is_exit_code_2(tmp_path: Path, base: Path, adapter: Path, capsys: Any) -> None:
    assert run("merge", base, adapter, tmp_path / "out", "--min-retained", 1.5) == 2
    shown = capsys.readouterr()
    assert "refused" in shown.out and "survived the rounding" in shown.err and "Traceback" not in shown.err
    assert not any(tmp_path.iterdir())


def test_lost_gain_is_refused(tmp_path: Path, base: Path, adapter: Path, data: Path) -> None:
    """The base itself, given as the merged model, keeps nothing of the gain."""
    check = loss_check(str(base), str(adapter), str(data), 128, 0.85)
    with pytest.raises(ValueError, match=r"keeps 0\.0% of the adapter's gain .* less than the 85%"):
        check(base, None)  # type: ignore[arg-type]


def test_losses_are_per_token(base: Path, adapter: Path, data: Path) -> None:
    """Padding does not count: batches of eight give what one example at a time gives, weighted by tokens."""
    examples = encoded_examples(str(data), tiny.tokenizer(), 64)
    model = load_model(base, dtype=torch.float32)
    losses, counts = [], []
    for example in examples:
        losses.append(held_out_loss(model, [example]))
        counts.append(sum(label != -100 for label in example["labels"][1:]))
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert losses_with_and_without(str(base), str(adapter), examples)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "int8"], "to is 'int8', expected nvfp4"),
        (["--rounding", "up"], "rounding is 'up'"),
        (["--eval", "/nowhere/data.jsonl"], "no such data file"),
        (["--onto", "/nowhere/dense"], "no such file or folder"),
        (["--max-shard-size", "big"], "no size"),
        (["--min-retained", "nan"], "less than the nan% asked for"),
        (["--eval", "rows.jsonl", "--eval-sequence-len", "-3"], "--eval-sequence-len"),
    ],
)
def test_bad_input(tmp_path: Path, base: Path, adapter: Path, arguments: list[str], message: str, capsys: Any) -> None:
    assert run("merge", base, adapter, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert message in " ".join(error.split()) and "Traceback" not in error
    assert not any(tmp_path.iterdir())
