"""Merging against PEFT on a dense copy, against the in-memory merge, and against what must not change."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.detect import read_config
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.load import load_dense_model, load_model
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.checkpoint.merge_report import AdapterLost
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import Shards
from halfbyte.lora import metadata as lora_metadata
from halfbyte.lora.merge import merged_parts
from halfbyte.lora.merge_aware import make_merge_aware, merged_digest, merged_weights, quantizer_of
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.dequantize import dequantize

from .conftest import LINEAR, make_adapter, save_dense, tiny_config


def factors(folder: Path, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = load_file(folder / "adapter_model.safetensors")
    return tensors[f"base_model.model.{layer}.lora_A.weight"], tensors[f"base_model.model.{layer}.lora_B.weight"]


def read_parts(folder: Path) -> dict[str, Any]:
    with Shards(folder) as shards:
        found = TorchaoFormat().find(shards, read_config(folder))
        return {fqn: TorchaoFormat().read(shards, stored) for fqn, stored in found.items()}


def assert_same_bytes(a: Path, b: Path, *, but: tuple[str, ...] = ()) -> None:
    with Shards(a) as first, Shards(b) as second:
        assert set(first) == set(second)
        for key, value in first.metadata.items():  # the list of names may come in another order
            assert value == second.metadata[key] or sorted(json.loads(value)) == sorted(
                json.loads(second.metadata[key])
            )
        for key in first:
            if not key.endswith(but or ("no such ending",)):
                x, y = first.read(key).reshape(-1).view(torch.uint8), second.read(key).reshape(-1).view(torch.uint8)
                assert torch.equal(x, y), key


# ---- to NVFP4


def test_codes_are_the_in_memory_merge(tmp_path: Path, ours: Path, adapter: Path) -> None:
    """Writer and trainer share one function; everything that is no code is the base's, byte for byte."""
    report = merge_checkpoint(ours, adapter, tmp_path / "out", seed=7)
    before, after = read_parts(ours), read_parts(tmp_path / "out")
    for fqn, parts in before.items():
        expected = merged_parts(parts, *factors(adapter, fqn), 2.0, name=fqn, seed=7)
        assert torch.equal(after[fqn].qdata, expected.qdata)
    assert_same_bytes(ours, tmp_path / "out", but=("_weight_qdata",))
    assert (tmp_path / "out" / "config.json").read_text() == (ours / "config.json").read_text()
    assert (tmp_path / "out" / "generation_config.json").exists()
    record = json.loads((tmp_path / "out" / "halfbyte.json").read_text())
    assert (record["seed"], record["rounding"], record["block_scales"]) == (7, "dither", "keep")
    assert len(report.layers) == 14 and report.retained.kept > 0.85 and not report.warnings
    assert record["retained"] == report.retained.kept


def test_reloaded_model_answers_like_the_trained_one(
    tmp_path: Path, ours: Path, adapter: Path, tokens: torch.Tensor, plain_load: Callable[..., Any]
) -> None:
    """The dithered file differs from the live model by rounding noise of a step of 4-bit codes in a few
    weights, so logits must be nearer to the trained model's than to the base's; plain transformers reads the same."""
    from peft import PeftModel

    merge_checkpoint(ours, adapter, tmp_path / "out", scales="keep")
    trained = PeftModel.from_pretrained(load_model(ours, dtype=torch.float32), adapter).eval()
    with torch.no_grad():
        wanted, base = trained(tokens).logits, load_model(ours, dtype=torch.float32)(tokens).logits
        merged = load_model(tmp_path / "out", dtype=torch.float32)(tokens).logits
        assert torch.equal(load_model(tmp_path / "out")(tokens).logits, plain_load(tmp_path / "out")(tokens).logits)
    assert (merged - wanted).norm() < 0.7 * (base - wanted).norm()


FRESH = """
import sys
import torch
from transformers import AutoModelForCausalLM
from halfbyte import load_model
folder, tokens = sys.argv[1], torch.load(sys.argv[2])
with torch.no_grad():
    models = load_model(folder, dtype=torch.float32), load_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    torch.save([model(tokens).logits for model in models], sys.argv[3])
"""


def test_a_fresh_process_gives_the_trained_logits(tmp_path: Path, ours: Path, tokens: torch.Tensor) -> None:
    """SCENARIOS n6: nothing of the live objects is needed. A merge-aware adapter computes with the very codes that its
    merge writes, so fp32 logits agree to the order of summation; transformers with torchao equals us bit for bit."""
    model = make_merge_aware(make_adapter(tmp_path / "a", load_model(ours, dtype=torch.float32)), seed=3)
    with torch.no_grad():
        trained, base = model(tokens).logits, load_model(ours, dtype=torch.float32)(tokens).logits
    merge_checkpoint(ours, tmp_path / "a", tmp_path / "out", seed=3)
    torch.save(tokens, tmp_path / "tokens.pt")
    arguments = [str(tmp_path / name) for name in ("out", "tokens.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", FRESH, *arguments], check=True, stderr=subprocess.DEVNULL)
    merged, ours_bf16, theirs_bf16 = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(merged, trained, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours_bf16, theirs_bf16)
    assert (trained - base).norm() > 0.1 * base.norm()


@pytest.mark.parametrize("scales", ["keep", "fresh"])
@pytest.mark.parametrize("rounding", ["dither", "nearest"])
def test_zero_adapter_gives_the_same_bytes(tmp_path: Path, theirs: Path, rounding: str, scales: str) -> None:
    """SCENARIOS n19: whatever quantizer made the base. Codes are replaced by random ones, -0 included, and scales by
    ones that no maximum explains; components lie in different shards (n17)."""
    base = tmp_path / "base"
    shutil.copytree(theirs, base)
    generator = torch.Generator().manual_seed(0)
    for path in base.glob("*.safetensors"):
        with Shards(theirs) as shards:
            metadata = shards.metadata
        tensors = load_file(path)
        for key, tensor in tensors.items():
            if key.endswith("_weight_qdata"):
                tensor.random_(0, 256, generator=generator)
                tensor[0, 0] = 0x88
            if key.endswith("_weight_scale"):
                tensor.view(torch.uint8).random_(1, 0x7F, generator=generator)
        save_file(tensors, path, metadata)
    make_adapter(tmp_path / "adapter", load_model(base), strength=0.0)
    report = merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out", rounding=rounding, scales=scales)
    assert_same_bytes(base, tmp_path / "out")
    assert report.retained.kept == 1.0


def test_nearest_loses_a_small_adapter_and_says_so(tmp_path: Path, ours: Path) -> None:
    """SCENARIOS n7: refused with the number, nothing written; on request written, with a warning."""
    make_adapter(tmp_path / "adapter", load_model(ours), strength=0.0005)
    with pytest.raises(AdapterLost, match=r"Only \d+\.\d% .* less than the 85%.*Nothing was written") as lost:
        merge_checkpoint(ours, tmp_path / "adapter", tmp_path / "out", rounding="nearest")
    assert len(lost.value.report.layers) == 14 and lost.value.report.retained.kept < 0.5
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}
    report = merge_checkpoint(ours, tmp_path / "adapter", tmp_path / "out", rounding="nearest", min_retained=0)
    assert f"rounding to nearest kept {report.retained.kept:.1%} of the adapter's change" in report.warnings[0]
    assert "nearest" in (tmp_path / "out" / "halfbyte.json").read_text()
    dithered = merge_checkpoint(ours, tmp_path / "adapter", tmp_path / "dithered")
    assert dithered.retained.kept > 0.85


def test_onto_the_dense_original(tmp_path: Path, dense: Path, ours: Path, adapter: Path) -> None:
    """As if the merged dense model had been quantized: q/k/v and gate/up share a scale again, names and layout kept."""
    report = merge_checkpoint(ours, adapter, tmp_path / "out", onto=dense)
    assert report.retained.kept > 0.85
    weights = load_file(dense / "model.safetensors")
    for fqn in read_parts(ours):
        lora_A, lora_B = factors(adapter, fqn)
        weights[f"{fqn}.weight"] = weights[f"{fqn}.weight"].float() + 2.0 * (lora_B.double() @ lora_A.double()).float()
    shutil.copytree(dense, tmp_path / "merged dense")
    save_file(weights, tmp_path / "merged dense" / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(tmp_path / "merged dense", tmp_path / "expected")
    assert_same_bytes(tmp_path / "expected", tmp_path / "out")


def test_onto_a_foreign_model(tmp_path: Path, ours: Path, adapter: Path) -> None:
    other = save_dense(tmp_path / "other", tiny_config(initializer_range=0.5))
    with pytest.raises(ValueError, match=r"model\.layers\.0\..*differs from the base's by \d+%"):
        merge_checkpoint(ours, adapter, tmp_path / "out", onto=other)
    smaller = save_dense(tmp_path / "smaller", tiny_config(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"the base has model\.layers\.1\..*the dense model lacks it"):
        merge_checkpoint(ours, adapter, tmp_path / "out", onto=smaller)


def test_merge_aware_adapter_becomes_the_bytes_it_was_trained_with(tmp_path: Path, ours: Path) -> None:
    """Its seed and modes are taken from its record, and the digest it recorded must come out; else it is refused."""
    base = load_model(ours)
    model = make_merge_aware(make_adapter(tmp_path / "a", base, record=False), seed=11, scales="fresh")
    described = lora_metadata.describe(
        model, list(nvfp4_modules(load_model(ours))), mode="merge-aware", quantizer=quantizer_of(model)
    )
    lora_metadata.write(tmp_path / "a", dataclasses.replace(described, merged_digest=merged_digest(model)))
    report = merge_checkpoint(ours, tmp_path / "a", tmp_path / "out")
    assert (report.settings.seed, report.settings.scales) == (11, "fresh")
    written = read_parts(tmp_path / "out")
    for name, parts in merged_weights(model):
        assert torch.equal(written[name].qdata, parts.qdata)
        assert torch.equal(written[name].scale.view(torch.uint8), parts.scale.view(torch.uint8))
    lora_metadata.write(tmp_path / "a", dataclasses.replace(described, merged_digest="0" * 64))
    with pytest.raises(ValueError, match="the adapter was trained for 0000000000000000"):
        merge_checkpoint(ours, tmp_path / "a", tmp_path / "out2")
    merge_checkpoint(ours, tmp_path / "a", tmp_path / "out3", seed=12)


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_a_base_in_another_format_comes_back_in_it(tmp_path: Path, ours: Path, adapter: Path, format: str) -> None:
    """Same parts, same digests, so the same codes as from the torchao file; all else is the base's own bytes."""
    export_checkpoint(ours, tmp_path / "base", format=format, max_shard_size="8KB")
    merge_checkpoint(tmp_path / "base", adapter, tmp_path / "out", max_shard_size="8KB")
    merge_checkpoint(ours, adapter, tmp_path / "torchao")
    export_checkpoint(tmp_path / "torchao", tmp_path / "expected", format=format)
    assert_same_bytes(tmp_path / "expected", tmp_path / "out")
    assert_same_bytes(tmp_path / "base", tmp_path / "out", but=("weight_packed", "proj.weight"))
    merge_checkpoint(ours, adapter, tmp_path / "converted", format=format)
    assert_same_bytes(tmp_path / "expected", tmp_path / "converted")
    assert {path.name for path in (tmp_path / "converted").iterdir()} == {
        path.name for path in (tmp_path / "expected").iterdir()
    }
    for name in ("config.json", "hf_quant_config.json"):
        if (tmp_path / "base" / name).exists():
            assert json.loads((tmp_path / "out" / name).read_text()) == read_config_like(tmp_path / "base" / name)
    merge_checkpoint(tmp_path / "base", adapter, tmp_path / "dense", to="bf16")
    assert "quantization_config" not in read_config(tmp_path / "dense")
    assert not (tmp_path / "dense" / "hf_quant_config.json").exists()
    load_dense_model(tmp_path / "dense")


def read_config_like(path: Path) -> Any:
    return json.loads(path.read_text())


def test_fused_experts_are_carried_along(tmp_path: Path, tokens: torch.Tensor) -> None:
    """Keys that transformers stacks into one parameter are many keys of the file; a merge keeps every one."""
    from transformers import AutoConfig

    from .test_load import SMALL

    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=2)
    quantize_checkpoint(save_dense(tmp_path / "dense", config), tmp_path / "base")
    make_adapter(tmp_path / "adapter", load_model(tmp_path / "base"), target_modules=["q_proj"])
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_same_bytes(tmp_path / "base", tmp_path / "out", but=("q_proj._weight_qdata",))
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "bf16", to="bf16")
    assert torch.isfinite(load_dense_model(tmp_path / "bf16")(tokens).logits).all()


# ---- to a dense dtype, against PEFT


def peft_merged(base: Path, adapter: Path) -> Any:
    """PEFT's merge into a dense fp32 copy of the NVFP4 base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    nvfp4 = load_model(base, dtype=torch.float32)
    copy = AutoModelForCausalLM.from_config(nvfp4.config, dtype=torch.float32)
    layers = nvfp4_modules(nvfp4)
    state = {k: v for k, v in nvfp4.state_dict().items() if v.dtype != torch.uint8}
    state |= {f"{fqn}.weight": dequantize(layer.parts(), torch.float32) for fqn, layer in layers.items()}
    copy.load_state_dict(state)
    return PeftModel.from_pretrained(copy, adapter).merge_and_unload()


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 3, "down_proj": 32},
    },
    "lm_head": {"target_modules": [*LINEAR, "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "modules_to_save": {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_dense_merge_equals_pefts(tmp_path: Path, name: str, tied: bool, tokens: torch.Tensor) -> None:
    """fp32: PEFT adds an fp32 product to fp32 weights, we an fp64 product rounded once to fp32, so they differ by a few
    ULPs of the delta; 1e-6 of the largest weight covers that and no mistake in scaling, pattern or layer. With tied
    embeddings, the merged model must still be the unmerged one: a change to one of two tied modules unties them."""
    from peft import PeftModel

    base = save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=tied))
    quantize_checkpoint(base, tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=torch.float32)
    make_adapter(tmp_path / "adapter", model, **CONFIGS[name])
    report = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", to="fp32")
    assert report.retained.kept == pytest.approx(1, abs=1e-3)
    merged = load_dense_model(tmp_path / "out", dtype=torch.float32)
    unmerged = PeftModel.from_pretrained(
        load_model(tmp_path / "base", dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, unmerged(tokens).logits, atol=2e-5, rtol=1e-4)
    if not tied:
        reference = peft_merged(tmp_path / "base", tmp_path / "adapter").state_dict()
        for key, value in load_file(tmp_path / "out" / "model.safetensors").items():
            torch.testing.assert_close(value.float(), reference[key], atol=1e-6 * float(value.abs().max()), rtol=1e-6)
    config = read_config(tmp_path / "out")
    assert "quantization_config" not in config and config["dtype"] == "float32"


def test_nvfp4_merge_of_tied_embeddings(tmp_path: Path, tokens: torch.Tensor, plain_load: Callable[..., Any]) -> None:
    """An adapter on lm_head alone unties the two; the file lists the new tensor, and plain transformers reads it."""
    quantize_checkpoint(save_dense(tmp_path / "dense", tiny_config(tie_word_embeddings=True)), tmp_path / "base")
    make_adapter(tmp_path / "adapter", load_model(tmp_path / "base"), target_modules=["q_proj", "lm_head"])
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    model, reference = load_model(tmp_path / "out"), plain_load(tmp_path / "out")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_bf16_is_the_sum_rounded_once(tmp_path: Path, ours: Path, adapter: Path) -> None:
    merge_checkpoint(ours, adapter, tmp_path / "out", to="bf16", max_shard_size="8KB")
    with Shards(tmp_path / "out") as shards:
        for fqn, parts in read_parts(ours).items():
            lora_A, lora_B = factors(adapter, fqn)
            exact = dequantize(parts, torch.float32).double() + 2.0 * lora_B.double() @ lora_A.double()
            torch.testing.assert_close(shards.read(f"{fqn}.weight").double(), exact, atol=0, rtol=2**-8)
        with Shards(ours) as before:
            assert torch.equal(shards.read("lm_head.weight"), before.read("lm_head.weight"))


# ---- tiny shards, renamed keys, partial adapters


def test_renamed_keys(tmp_path: Path) -> None:
    """The adapter speaks the model's names, the file the hub's (SCENARIOS n25)."""
    from transformers import AutoConfig

    from .test_load import ARCHITECTURES, SMALL

    config = AutoConfig.for_model("exaone", **SMALL, **ARCHITECTURES["exaone"])
    quantize_checkpoint(save_dense(tmp_path / "dense", config), tmp_path / "base", max_shard_size="4KB")
    make_adapter(tmp_path / "adapter", load_model(tmp_path / "base"), target_modules=["q_proj", "up_proj"])
    report = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert [layer.name for layer in report.layers if "q_proj" in layer.name][0] == "model.layers.0.self_attn.q_proj"
    with Shards(tmp_path / "out") as shards:
        assert "transformer.h.0.attn.attention.q_proj._weight_qdata" in shards
    merged, base = nvfp4_modules(load_model(tmp_path / "out")), nvfp4_modules(load_model(tmp_path / "base"))
    for fqn in base:
        changed = not torch.equal(merged[fqn].qdata, base[fqn].qdata)
        assert changed == fqn.endswith(("q_proj", "up_proj"))


# ---- refusals


def test_another_base(tmp_path: Path, theirs: Path, ours: Path, adapter: Path, dense: Path) -> None:
    """The adapter recorded digests of its base's codes; `ours` and `theirs` differ where scales are shared."""
    with pytest.raises(ValueError, match=r"not the base that the adapter was trained on .* --any-base"):
        merge_checkpoint(theirs, adapter, tmp_path / "out")
    report = merge_checkpoint(theirs, adapter, tmp_path / "out", any_base=True)
    assert any("not the base" in warning for warning in report.warnings)
    with pytest.raises(ValueError, match="found a dense model"):
        merge_checkpoint(dense, adapter, tmp_path / "out2")
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json: not there"):
        merge_checkpoint(ours, dense, tmp_path / "out2")
    with pytest.raises(ValueError, match="to is int8, expected|to is 'int8', expected"):
        merge_checkpoint(ours, adapter, tmp_path / "out2", to="int8")
    with pytest.raises(ValueError, match="format is 'gguf' with to 'nvfp4', expected torchao"):
        merge_checkpoint(ours, adapter, tmp_path / "out2", format="gguf")
    with pytest.raises(ValueError, match="format is 'modelopt' with to 'bf16'"):
        merge_checkpoint(ours, adapter, tmp_path / "out2", format="modelopt", to="bf16")
    with pytest.raises(ValueError, match="rounding is 'up'"):
        merge_checkpoint(ours, adapter, tmp_path / "out2", rounding="up")
    with pytest.raises(FileExistsError):
        merge_checkpoint(ours, adapter, ours)


def test_check_sees_the_folder_and_can_undo(tmp_path: Path, ours: Path, adapter: Path) -> None:
    def check(folder: Path, report: Any) -> None:
        assert len(nvfp4_modules(load_model(folder))) == 14 and report.layers
        raise ValueError("no better")

    with pytest.raises(ValueError, match="no better"):
        merge_checkpoint(ours, adapter, tmp_path / "out", check=check)
    assert not any(tmp_path.iterdir())
