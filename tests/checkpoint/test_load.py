"""`load_model` against transformers' own loading of the same folder, across architectures, and against damage."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.load import load_dense_model, load_model
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import INDEX_FILE, Shards
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.linear import ActivationQuant
from halfbyte.nvfp4.quantize import quantize

from .conftest import VOCAB, save_dense, tiny_config

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What each adds: biases on q, k, v; norms of heads; scaled embeddings and two rotary bases; qkv and gate_up as one
# linear of the model's own; keys that the hub spells otherwise (transformer.h.0.attn.attention.q_proj); shared experts
# in NVFP4, one linear each, beside dense ones that transformers stacks.
ARCHITECTURES = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "phi3": {},
    "exaone": {"num_layers": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "deepseek_v3": {
        **EXPERTS,
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.for_model(request.param, **{**SMALL, **ARCHITECTURES[request.param]})
    root = tmp_path_factory.mktemp(request.param)
    quantize_checkpoint(save_dense(root / "dense", config), root / "nvfp4")
    return root / "nvfp4"


def assert_same_model(model: Any, reference: Any, tokens: torch.Tensor) -> None:
    """Logits, buffers, flags and generation config of two models of one class."""
    assert type(model) is type(reference)
    assert model.training is reference.training is False
    buffers = dict(reference.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == buffers[name].dtype and torch.equal(buffer, buffers[name]), name
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_architectures(folder: Path, plain_load: Callable[..., Any], tokens: torch.Tensor) -> None:
    """Bit-equal to transformers with torchao: both decode to bf16, then matmul. Renamed keys included (n25)."""
    model = load_model(folder)
    assert len(nvfp4_modules(model)) >= 8
    if "shared_expert" in str(model):
        assert any(".shared_expert" in name for name in nvfp4_modules(model))
    assert_same_model(model, plain_load(folder), tokens)


def test_loads_what_torchao_wrote(theirs: Path, plain_load: Callable[..., Any], tokens: torch.Tensor) -> None:
    model = halfbyte.load_model(theirs)
    assert_same_model(model, plain_load(theirs), tokens)
    assert model.generation_config.max_new_tokens == 17
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.bfloat16 and model.config._name_or_path == str(theirs)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("dtype", [torch.float32, "float16"])
def test_dtype(theirs: Path, dense: Path, dtype: Any, tokens: torch.Tensor) -> None:
    """In another dtype: the dense model with every weight replaced by its decoded one, bit for bit."""
    model = load_model(theirs, dtype=dtype)
    reference = load_dense_model(dense, dtype=dtype)
    for fqn, layer in nvfp4_modules(model).items():
        reference.get_submodule(fqn).weight.data = dequantize(layer.parts(), reference.dtype)
    assert_same_model(model, reference, tokens)
    assert {p.dtype for p in model.parameters()} == {reference.dtype, torch.uint8}


def test_dense_model_equals_transformers(dense: Path, plain_load: Callable[..., Any], tokens: torch.Tensor) -> None:
    assert_same_model(load_dense_model(dense), plain_load(dense), tokens)


def test_tied_embeddings(tmp_path: Path, tokens: torch.Tensor, plain_load: Callable[..., Any]) -> None:
    """One copy on disk, one tensor in memory (SCENARIOS n16); a source with two equal copies gives one as well."""
    source = save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=True))
    quantize_checkpoint(source, tmp_path / "nvfp4", max_shard_size="4KB")
    with Shards(tmp_path / "nvfp4") as shards:
        assert "model.embed_tokens.weight" in shards and "lm_head.weight" not in shards
    assert "lm_head" not in (tmp_path / "nvfp4" / INDEX_FILE).read_text()
    model = load_model(tmp_path / "nvfp4")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_model(model, plain_load(tmp_path / "nvfp4"), tokens)


def test_two_copies_of_tied_embeddings_become_one(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=True))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(source, tmp_path / "nvfp4")
    with Shards(tmp_path / "nvfp4") as shards:
        assert "lm_head.weight" not in shards


def test_components_survive_moves_and_casts(ours: Path) -> None:
    """SCENARIOS n22: off to another place and back, cast, copied, through a state dict: every byte as on disk."""
    model = load_model(ours)
    bytes_before = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    for moved in (model.to("cpu"), copy.deepcopy(model), copy.deepcopy(model).half().float().bfloat16()):
        after = dict(moved.named_parameters())
        assert all(torch.equal(value, after[name]) for name, value in bytes_before.items())
    fresh = load_model(ours)
    for layer in nvfp4_modules(fresh).values():
        layer.qdata.data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(value, fresh.get_parameter(name)) for name, value in bytes_before.items())


def test_dynamic_and_static_activations(tmp_path: Path, dense: Path) -> None:
    """SCENARIOS n23: such files load on any machine, and the layers carry the setting."""
    quantize_checkpoint(dense, tmp_path / "nvfp4", activations="dynamic")
    model = load_model(tmp_path / "nvfp4")
    assert {layer.activation for layer in nvfp4_modules(model).values()} == {ActivationQuant(scale=None)}


def test_not_divisible_and_excluded_layers_stay_dense(
    tmp_path: Path, plain_load: Callable[..., Any], tokens: torch.Tensor
) -> None:
    """intermediate_size 72: down_proj cannot be NVFP4; gate and up can, out_features need not be divisible by 16."""
    source = save_dense(tmp_path / "dense", tiny_config(intermediate_size=72))
    report = quantize_checkpoint(source, tmp_path / "nvfp4", exclude=["model.layers.1.*", "o_proj"])
    assert report.dense["model.layers.0.mlp.down_proj"] == "in_features 72 is not divisible by 16"
    model = load_model(tmp_path / "nvfp4")
    assert set(nvfp4_modules(model)) == {
        f"model.layers.0.{leaf}"
        for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert_same_model(model, plain_load(tmp_path / "nvfp4"), tokens)


def test_under_a_live_zero3_config(ours: Path, tokens: torch.Tensor) -> None:
    """With `TrainingArguments(deepspeed=...)` alive, transformers would partition what it builds; it must not."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    with torch.no_grad():
        expected = load_model(ours)(tokens).logits
        alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
        model = load_model(ours)
        del alive
        assert torch.equal(model(tokens).logits, expected)


def test_weights_that_the_architecture_ignores(
    tmp_path: Path, ours: Path, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft heads and vision towers lie beside many models; transformers lists them by pattern, and we skip those."""
    from transformers import LlamaForCausalLM

    folder = copied(ours, tmp_path / "m")
    with Shards(ours) as shards:
        tensors, metadata = {key: shards.read(key) for key in shards}, dict(shards.metadata)
    for key in list(tensors):
        if key.startswith("model.layers.1.mlp.up_proj."):
            tensors[key.replace("model.layers.1", "mtp")] = tensors[key].clone()
    names = [*json.loads(metadata["tensor_names"]), "mtp.mlp.up_proj.weight"]
    metadata |= {
        "mtp.mlp.up_proj.weight": metadata["model.layers.1.mlp.up_proj.weight"],
        "tensor_names": json.dumps(names),
    }
    save_file(tensors, folder / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=r"mtp\.mlp\.up_proj is an NVFP4 weight, but the model .* has no such linear"):
        load_model(folder)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    with torch.no_grad():
        assert torch.equal(load_model(folder)(tokens).logits, load_model(ours)(tokens).logits)


# What cannot be loaded right is refused, in a sentence that says where.


def copied(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    return out


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=2)
    root = tmp_path_factory.mktemp("mixtral")
    report = quantize_checkpoint(save_dense(root / "dense", config), root / "nvfp4")
    assert report.dense["model.layers.0.mlp.experts.gate_up_proj"] == "transformers fuses it while loading"
    return root / "nvfp4"


def test_dense_experts_load_like_transformers(
    mixtral: Path, plain_load: Callable[..., Any], tokens: torch.Tensor
) -> None:
    """SCENARIOS n25: the dense experts are stacked by transformers, beside NVFP4 attention."""
    model = load_model(mixtral)
    assert len(nvfp4_modules(model)) == 8
    assert_same_model(model, plain_load(mixtral), tokens)


def test_nvfp4_experts_are_refused_with_the_layers_name(tmp_path: Path, mixtral: Path) -> None:
    """SCENARIOS n25: 4-bit weights cannot be stacked; said before anything is loaded."""
    fqn = "model.layers.0.block_sparse_moe.experts.0.w1"
    with Shards(mixtral) as shards:
        tensors, metadata = {key: shards.read(key) for key in shards}, dict(shards.metadata)
    parts = quantize(tensors.pop(f"{fqn}.weight"))
    stored = TorchaoFormat().plan(fqn, fqn, parts.shape, None, torch.bfloat16)
    tensors |= TorchaoFormat().encode(stored, parts)
    names = [*json.loads(metadata["tensor_names"]), f"{fqn}.weight"]
    metadata |= TorchaoFormat().file_metadata([f"{fqn}.weight"], {fqn: stored}) | {"tensor_names": json.dumps(names)}
    folder = copied(mixtral, tmp_path / "m")
    save_file(tensors, folder / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=rf"{fqn} is NVFP4, but transformers fuses it"):
        load_model(folder)


def test_save_pretrained_is_refused_but_for_adapters(tmp_path: Path, ours: Path, tokens: torch.Tensor) -> None:
    """What it would write looks like a checkpoint, and loads with random linears."""
    from peft import LoraConfig, get_peft_model

    model = load_model(ours)
    with pytest.raises(ValueError, match=r"no loader knows its layers' raw components.*halfbyte merge BASE ADAPTER"):
        model.save_pretrained(tmp_path / "raw")
    assert not any((tmp_path / "raw").iterdir())
    assert model.generate(tokens[:1], max_new_tokens=2, do_sample=False).shape == (1, tokens.shape[1] + 2)
    copy.deepcopy(model)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "peft")
    assert (tmp_path / "peft" / "adapter_model.safetensors").exists()
    model._hf_peft_config_loaded = True  # as transformers' add_adapter marks it, of which only the adapter is saved
    assert model.hf_quantizer.get_state_dict_and_metadata(model) == (None, {})


def test_refusals_of_folders(tmp_path: Path, dense: Path, ours: Path) -> None:
    with pytest.raises(ValueError, match=r"found a dense model, expected NVFP4 weights.*halfbyte quantize"):
        load_model(dense)
    raw = {key: value for key, value in load_model(ours).state_dict().items() if key != "lm_head.weight"}
    shutil.copytree(dense, tmp_path / "raw")
    save_file(raw, tmp_path / "raw" / "model.safetensors", {"format": "pt"})  # as save_pretrained once wrote it
    with pytest.raises(ValueError, match=r"written by save_pretrained of a model with NVFP4 layers"):
        load_model(tmp_path / "raw")
    with pytest.raises(ValueError, match="found a quantized model"):
        load_dense_model(ours)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no-owner/no-model: no such folder here"):
        load_model("no-owner/no-model")
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        load_model(ours, dtype="int8")
    with pytest.raises(ValueError, match="expected float32"):
        load_model(ours, dtype="float31")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128, "head_dim": 16}, r"down_proj\._weight_qdata holds a weight \(64, 80\), .* \(128, 80\)"),
        ({"vocab_size": 99}, r"lm_head\.weight is \[96, 64\], but the config expects \[99, 64\]"),
        ({"intermediate_size": 96}, r"_weight_qdata holds a weight .*80.* the config expects"),
        ({"num_hidden_layers": 1}, r"layers\.1\..* no such linear layer"),
        ({"num_hidden_layers": 3}, r"needs, but no file holds model\.layers\.2\..* more"),
        ({"attention_bias": True}, r"needs, but no file holds .*bias"),
        ({"model_type": "no_such_type"}, r"transformers does not understand its config\.json"),
    ],
)
def test_config_and_weights_do_not_match(tmp_path: Path, ours: Path, changes: dict[str, Any], message: str) -> None:
    folder = copied(ours, tmp_path / "m")
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_missing_unexpected_and_truncated(tmp_path: Path, ours: Path) -> None:
    folder = copied(ours, tmp_path / "m")
    with Shards(folder) as shards:
        tensors, metadata = {key: shards.read(key) for key in shards}, dict(shards.metadata)
    for extra in ("model.layers.0.mlp.up_proj.bias", "model.layers.2.input_layernorm.weight"):
        save_file({**tensors, extra: torch.zeros(2)}, folder / "model.safetensors", metadata)
        with pytest.raises(ValueError, match=rf"files hold, but the model of the config does not know {extra}"):
            load_model(folder)
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=r"no file holds model\.norm\.weight"):
        load_model(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: found \d+ bytes, but its header describes"):
        load_model(folder)
