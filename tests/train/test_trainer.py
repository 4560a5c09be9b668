"""What a run leaves, and that its numbers mean what they say."""

import json
import re

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file

from halfbyte import load_model
from halfbyte.train import build, train
from halfbyte.train.config import OptimizerName, load_config
from halfbyte.train.data import load_data
from halfbyte.train.encode import IGNORED
from halfbyte.train.files import METRICS, PLOT, read_metrics
from tests.train import tiny


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    """A run of 12 steps with data held out: (config, result)."""
    made = config(tmp_path_factory.mktemp("run") / "out", val_set_size=5, eval_steps=6, eval_batch_size=3)
    return made, train(made)


def token_loss(model, rows) -> float:
    """Mean loss per predicted token, one example at a time, by the model's own forward in float64 sums."""
    total, tokens = 0.0, 0
    for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        targets = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED).item()
        tokens += int((targets != IGNORED).sum())
    return total / tokens


def test_what_is_left(run) -> None:
    config, result = run
    folder = result.adapter.parent
    assert load_config(folder / "config.yaml") == config
    assert json.loads((folder / "versions.json").read_text())["torch"] == torch.__version__
    assert (folder / PLOT).read_bytes().startswith(b"\x89PNG")
    rows = read_metrics(folder / METRICS)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 6, 12]
    assert all(row["tokens_per_second"] > 0 and row["memory_gb"] > 0 for row in rows if "loss" in row)
    assert sorted(path.name for path in result.adapter.iterdir() if path.suffix in (".safetensors", ".json")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert result.step == 12 and result.loss_after < result.loss_before


def test_the_adapters_card_is_ours_and_the_run_has_none(run, tmp_path, config) -> None:
    """TRL and PEFT leave forms that name no base and no data."""
    assert "Trained with halfbyte" in (run[1].adapter / "README.md").read_text()
    train(config(tmp_path / "saves", save_steps=2, max_steps=2))
    assert not (tmp_path / "saves" / "README.md").exists()


def test_the_adapter_loads_by_plain_peft_and_gives_the_loss_that_was_reported(run, base) -> None:
    """On our model and on a dense copy of it; the held-out loss is the mean over tokens, whatever the batches were.

    Batches of 3 with padding against single examples change only the order of sums: 1e-5 on a loss near 5.
    """
    config, result = run
    held_out = load_data(config, tiny.tokenizer()).held_out
    ours = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), result.adapter).eval()
    assert token_loss(ours, held_out) == pytest.approx(result.loss_after, abs=1e-5)
    dense = PeftModel.from_pretrained(dense_copy(base), result.adapter).eval()
    assert token_loss(dense, held_out) == pytest.approx(result.loss_after, abs=1e-5)
    with ours.disable_adapter():
        assert token_loss(ours, held_out) == pytest.approx(result.loss_before, abs=1e-5)


def dense_copy(base):
    """An ordinary model with the values of the NVFP4 one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = load_model(base, dtype=torch.float32)
    config = AutoConfig.from_pretrained(base)
    del config.quantization_config
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for fqn, module in ours.named_modules():
        if list(module.children()):
            continue
        target = dense.get_submodule(fqn)
        if getattr(module, "weight", None) is not None:
            target.weight.data = module.weight.detach() + 0.0
    return dense


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_torch_optimizers_get_the_config(name, config, tmp_path) -> None:
    cls, arguments = build.optimizer_cls_and_kwargs(
        config(tmp_path, optimizer=name, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1)
    )
    assert cls is torch.optim.AdamW and arguments.get("fused", False) == (name == "adamw_torch_fused")
    optimizer = cls([torch.nn.Parameter(torch.ones(3))], **arguments)
    assert optimizer.defaults["lr"] == 1e-2 and optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["eps"] == 1e-6 and optimizer.defaults["weight_decay"] == 0.1


def test_every_optimizer_name_has_an_entry() -> None:
    assert set(OptimizerName.__args__) == build.OPTIMIZERS.keys()


def test_packed_and_checkpointed_in_bf16(config, tmp_path) -> None:
    """The switches that change the forward pass, together, with another type of data; adapters stay fp32."""
    text = tiny.write_lines(tmp_path / "text.jsonl", [{"text": f"the sum of {n} and {n}. " * 3} for n in range(24)])
    result = train(
        config(
            tmp_path / "out",
            datasets=[str(text)],
            sample_packing=True,
            gradient_checkpointing=True,
            bf16=True,
            lora_modules_to_save=None,
            max_steps=6,
        )
    )
    rows = [row for row in read_metrics(tmp_path / "out" / METRICS) if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {tensor.dtype for tensor in load_file(result.adapter / "adapter_model.safetensors").values()} == {
        torch.float32
    }


def test_packing_gives_the_loss_of_the_samples_alone(config, tmp_path, rows, base) -> None:
    """With packing, step 1 sees the same 20 examples in fewer rows: equal loss before any update.

    fp32, sums in another order: 1e-4 on a loss near 6. Label smoothing by neighbours would show in the first digit.
    """
    changes = {"max_steps": 1, "gradient_accumulation_steps": 1, "micro_batch_size": 20, "lora_dropout": 0.0}
    losses = []
    for packed in (False, True):
        output_dir = tmp_path / f"packed-{packed}"
        train(config(output_dir, sample_packing=packed, **changes))
        losses.append(read_metrics(output_dir / METRICS)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_python_yaml_and_config_agree_on_disk(run, tmp_path) -> None:
    """The resolved config is plain YAML that anyone can read."""
    config, result = run
    assert yaml.safe_load((result.adapter.parent / "config.yaml").read_text()) == config.model_dump(mode="json")


@pytest.mark.parametrize("method", ["merge_adapter", "merge_and_unload"])
@pytest.mark.parametrize("safe", [False, True])
def test_peft_merges_are_refused_and_the_adapter_lives_on(method, safe, run, base) -> None:
    """SCENARIOS n24: PEFT would write into a temporary and lose the adapter; instead a sentence names the remedy."""
    _, result = run
    model = PeftModel.from_pretrained(load_model(base, dtype=torch.float32), result.adapter).eval()
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    with pytest.raises(RuntimeError, match="halfbyte merge"):
        if method == "merge_adapter":
            model.merge_adapter(safe_merge=safe)
        else:
            model.merge_and_unload(safe_merge=safe)
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_inits_that_rewrite_the_base_are_refused_where_a_user_meets_them(init, config, tmp_path, base) -> None:
    """By our config in a sentence, and by the layer itself for those who call PEFT."""
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match=re.escape(f"{init} subtracts the adapter's start from the base weight")):
        config(tmp_path, peft_init_lora_weights=init)
    with pytest.raises(RuntimeError, match="cannot be written"):
        get_peft_model(
            load_model(base, dtype=torch.float32), LoraConfig(target_modules="all-linear", init_lora_weights=init)
        )


@pytest.mark.parametrize("init", ["gaussian", "orthogonal"])
def test_the_other_inits_train_from_the_bases_own_function(init, config, tmp_path, base) -> None:
    result = train(config(tmp_path / "out", peft_init_lora_weights=init, val_set_size=4, max_steps=2))
    plain = load_model(base, dtype=torch.float32)
    held_out = load_data(config(tmp_path, val_set_size=4), tiny.tokenizer()).held_out
    assert result.loss_before == pytest.approx(token_loss(plain, held_out), abs=1e-4)
