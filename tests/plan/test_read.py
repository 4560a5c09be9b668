"""A config read as numbers, against the models that transformers and PEFT build from it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peak_memory import SMALL, Case, build
from halfbyte.checkpoint.skeleton import load_config
from halfbyte.plan.read import read_shape
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import cut
from tests.train import tiny

MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 256},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32},
    "mamba": {},
}


def config_of(name: str):
    changes = {**SMALL, **MODELS[name], "num_hidden_layers": 2}
    if name in ("gpt_neox", "opt", "mamba"):
        changes.pop("num_key_value_heads")
    return AutoConfig.for_model(name, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_counted(name) -> None:
    """Exactly, whatever the architecture: attention, experts, state spaces, tied or not."""
    config = config_of(name)
    shape = read_shape(config, Path(name), Settings())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.num_blocks == 2 and bool(shape.notes) == (name in ("mixtral", "qwen3_moe", "mamba"))


@pytest.mark.parametrize(("name", "bf16"), [("llama", True), ("qwen3", False), ("gpt_neox", True), ("mixtral", False)])
def test_bytes_of_base_and_adapter_are_those_of_a_real_model(name, bf16) -> None:
    settings = Settings(bf16=bf16, device="cpu", lora_r=8)
    config = config_of(name)
    shape = read_shape(config, Path(name), settings)
    changes = config.to_diff_dict() | {"use_cache": False}
    model = build(Case(name, settings, name, {k: v for k, v in changes.items() if k != "model_type"}))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert shape.base_bytes(settings.width) == frozen
    router = (
        4 * 8 * (4 + 256) * 2 if name == "mixtral" else 0
    )  # adapted by PEFT, not counted: nothing beside the experts
    assert 4 * shape.adapter_params == trained - router


def test_targets_and_saved_modules() -> None:
    config = tiny.model_config(tie_word_embeddings=False)
    settings = Settings(lora_target_modules=("q_proj", "mlp.up_proj"), lora_modules_to_save=("lm_head",), lora_r=4)
    shape = read_shape(config, Path("x"), settings)
    assert shape.adapter_params == 2 * 4 * ((64 + 64) + (128 + 64))
    assert shape.saved_params == 320 * 64 and shape.head_saved
    pattern = Settings(lora_target_modules=r".*layers\.0\..*_proj", lora_r=4)
    assert read_shape(config, Path("x"), pattern).adapter_params == 4 * 1024


def test_packed_layers_are_read_off_the_files(tmp_path) -> None:
    """A base of which one layer stayed dense; the same from its config alone, which says so too."""
    from halfbyte.checkpoint.quantize import quantize_checkpoint

    dense = tiny.save_dense(tmp_path / "dense")
    quantize_checkpoint(
        dense, tmp_path / "base", exclude=["layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"][1:]
    )
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    whole = read_shape(tiny.model_config(), Path("x"), Settings()).packed_params
    for folder in (tmp_path / "base", tmp_path / "bare", tmp_path / "bare" / "config.json"):
        shape = read_shape(load_config(folder), folder, Settings())
        assert whole - shape.packed_params == 64 * 128, folder


def test_tensor_parallel_parts_add_up() -> None:
    """Two ranks: cut layers once in all, what is whole twice; factors as tp_layers.py cuts them."""
    shape = read_shape(tiny.model_config(), Path("x"), Settings(lora_r=4))
    half = cut(shape, 2)
    assert 2 * half.packed_params == shape.packed_params and half.root_params == shape.root_params
    whole_factors = 2 * 4 * (3 * 64 + 2 * 64 + 2 * 64)  # lora_A of q, k, v, gate, up; lora_B of o, down; two blocks
    assert 2 * half.adapter_params == shape.adapter_params + whole_factors
    with pytest.raises(ValueError, match="do not divide over 4"):
        cut(shape, 4)
    with pytest.raises(ValueError, match="no tensor-parallel plan"):
        cut(read_shape(config_of("gpt_neox"), Path("x"), Settings()).__class__(**{**vars(shape), "blocks": ()}), 2)
