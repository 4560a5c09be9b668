"""One config object, three ways to build it, and a sentence for everything that is wrong with it."""

import pytest
from pydantic import ValidationError

from halfbyte.train.config import TrainConfig, apply_override, build_config, config_help, dump_config, load_config

MINIMAL = {"base_model": "base", "datasets": [{"path": "a.jsonl"}], "output_dir": "out"}
YAML = """
base_model: base
datasets:
  - path: a.jsonl
learning_rate: 2e-4
lora_target_modules: [q_proj, v_proj]
output_dir: out
"""


def test_yaml_overrides_and_python_build_the_same_object(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    from_yaml = load_config(path, ["learning_rate=1e-3", "datasets.0.type=alpaca", "bf16=auto"])
    from_python = build_config(
        {
            **MINIMAL,
            "datasets": [{"path": "a.jsonl", "type": "alpaca"}],
            "learning_rate": 1e-3,
            "lora_target_modules": ["q_proj", "v_proj"],
        }
    )
    assert from_yaml == from_python


def test_resolved_config_reads_back_equal(tmp_path) -> None:
    config = build_config({**MINIMAL, "max_steps": 7, "adam_epsilon": 1e-8})
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        build_config(MINIMAL).lora_r = 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learnig_rate": 1}, "unknown key 'learnig_rate'; did you mean 'learning_rate'?"),
        ({"optim": "adamw"}, "did you mean 'optimizer'?"),
        ({"datasets": [{"pth": "a"}]}, "unknown key 'datasets.0.pth'; did you mean 'path'?"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; `halfbyte train --keys` lists all"),
        (
            {"fsdp_config": {"xyzzy": 1}},
            "unknown key 'fsdp_config.xyzzy'; expected reshard_after_forward, offload_params",
        ),
        ({"lora_r": "abc"}, "lora_r is 'abc', expected a valid integer"),
        ({"lora_r": 0}, "lora_r is 0, expected greater than 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf, expected a finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, expected a finite number"),
        ({"num_epochs": float("inf")}, "num_epochs is inf, expected a finite number"),
        ({"seed": 2**32}, "seed is 4294967296, expected less than 4294967296"),
        ({"base_model": ""}, "base_model is '', expected .* at least 1 character"),
        ({"output_dir": ""}, "output_dir is '', expected .* at least 1 character"),
        ({"bf16": "maybe"}, "bf16 is 'maybe', expected .*'auto'"),
        ({"optimizer": "adam"}, "'adamw_torch'.*'adamw8bit'"),
        ({"datasets": []}, "at least 1"),
        ({"datasets": 3}, "datasets is 3, expected a valid list"),
        ({"val_set_size": 1.5}, "share below 1"),
        ({"peft_init_lora_weights": "pissa"}, "peft_init_lora_weights: pissa subtracts .* frozen in 4 bits"),
        ({"peft_init_lora_weights": "magic"}, "expected .*'gaussian'"),
        ({"eval_steps": 5}, "no held-out data"),
        ({"val_set_size": 3, "test_datasets": ["b.jsonl"]}, "both set"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(change, message) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")) as raised:
        build_config({**MINIMAL, **change}, source="my.yaml")
    assert str(raised.value).startswith("my.yaml: ")
    assert "\n" not in str(raised.value)


def test_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="'output_dir' is missing"):
        build_config({"base_model": "b", "datasets": ["a.jsonl"]})


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "found list"), ("", "found nothing"), ("a: [1", "not readable as YAML"), ("word", "found str")],
)
def test_yaml_that_is_no_mapping(tmp_path, text, message) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match="no such config file"):
        load_config("nowhere.yaml")


def test_overrides_reach_into_lists_and_mappings() -> None:
    values = {"datasets": [{"path": "a"}]}
    apply_override(values, "datasets.0.path=b=c")
    apply_override(values, "max_steps=60")
    assert values == {"datasets": [{"path": "b=c"}], "max_steps": 60}
    for wrong in ("max_steps", "=3", "datasets.7.path=x", "datasets.path=x", "max_steps.a=1"):
        with pytest.raises(ValueError, match="override"):
            apply_override(values, wrong)


def test_every_key_has_help() -> None:
    assert all(field.description for field in TrainConfig.model_fields.values())
    assert "lora_r (16): Rank of the adapter." in config_help()


def test_axolotls_names_are_ours() -> None:
    names = """base_model adapter lora_r lora_alpha lora_dropout lora_target_modules datasets sequence_len
    sample_packing micro_batch_size gradient_accumulation_steps num_epochs max_steps learning_rate lr_scheduler
    warmup_steps optimizer
    weight_decay max_grad_norm gradient_checkpointing bf16 save_steps eval_steps val_set_size seed output_dir
    resume_from_checkpoint"""
    assert set(names.split()) <= TrainConfig.model_fields.keys()
