"""The `halfbyte` key: PEFT ignores it, another base is an error that names what differs, damage is found."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from halfbyte.lora import make_merge_aware, merged_digest
from halfbyte.lora import metadata as md
from halfbyte.lora.adapter_files import describe_adapter, load_adapter, save_adapter
from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.nvfp4 import ActivationQuant, nvfp4_modules
from tests.lora.models import nvfp4_mlp, with_lora

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_adapter(with_lora(nvfp4_mlp()), tmp_path)
    return tmp_path


def edit(folder: Path, **changes: Any) -> None:
    path = folder / md.CONFIG_NAME
    config = json.loads(path.read_text())
    config[md.KEY].update(changes)
    path.write_text(json.dumps(config))


def test_round_trip(saved: Path) -> None:
    found = md.read(saved)
    assert found == describe_adapter(with_lora(nvfp4_mlp()))
    assert found.mode == "plain" and sorted(found.targets) == ["down", "up"]
    assert found.targets["up"].shape == (64, 32) and found.targets["up"].activation == "none"
    assert {"torch", "peft", "halfbyte"} <= found.versions.keys() and len(found.base_digest) == 64
    md.check(found, nvfp4_mlp())
    md.check(found, with_lora(nvfp4_mlp()))


def test_peft_ignores_the_key(saved: Path) -> None:
    loaded = PeftModel.from_pretrained(nvfp4_mlp(), str(saved))
    assert torch.equal(loaded(X), with_lora(nvfp4_mlp())(X))
    assert LoraConfig.from_pretrained(str(saved)).r == 4


def test_loading_does_not_warn_of_the_key(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_adapter(nvfp4_mlp(), saved, is_trainable=True)
    assert torch.equal(loaded(X), with_lora(nvfp4_mlp())(X))
    assert any(parameter.requires_grad for parameter in loaded.parameters())


def test_an_override_is_recorded_on_the_next_save(saved: Path, tmp_path: Path) -> None:
    """Issue 5: attached to another base on purpose; whoever gets the adapter next can see it, and for good."""
    other = nvfp4_mlp()
    other.up.qdata[0] ^= 1
    loaded = load_adapter(other, saved, any_base=True)
    save_adapter(loaded, tmp_path / "next")
    overrides = md.read(tmp_path / "next").overrides
    digest = md.read(saved).base_digest[:16]
    assert overrides == (f"any_base: trained on base {digest}, attached to another, in which 1 of 2 layers differ",)
    save_adapter(load_adapter(other, tmp_path / "next"), tmp_path / "last")
    assert md.read(tmp_path / "last").overrides == overrides
    save_adapter(load_adapter(nvfp4_mlp(), saved, any_base=True), tmp_path / "same")
    assert md.read(tmp_path / "same").overrides == ()


def test_other_keys_stay(saved: Path) -> None:
    before = json.loads((saved / md.CONFIG_NAME).read_text())
    md.write(saved, describe_adapter(with_lora(nvfp4_mlp())))
    assert json.loads((saved / md.CONFIG_NAME).read_text()) == before and before["lora_alpha"] == 8
    assert sorted(path.name for path in saved.iterdir() if path.suffix == ".tmp") == []


@pytest.mark.parametrize("component", ["qdata", "scale", "global_scale"])
def test_another_base_is_named(saved: Path, component: str) -> None:
    other = nvfp4_mlp()
    getattr(other.up, component)[0] ^= 1
    with pytest.raises(ValueError, match="1 of 2 layers differ. up: digest is [0-9a-f]{16}, recorded [0-9a-f]{16}"):
        load_adapter(other, saved)
    assert load_adapter(other, saved, any_base=True)(X).shape == (5, 8)


def test_activation_and_missing_layers_are_named(saved: Path) -> None:
    with pytest.raises(ValueError, match="up: activation is dynamic, recorded none"):
        load_adapter(nvfp4_mlp(ActivationQuant()), saved)
    edit(saved, targets={"gate": md.read(saved).targets["up"].__dict__}, base_digest="")
    with pytest.raises(ValueError, match="damaged"):
        md.read(saved)
    recorded = md.AdapterMetadata(targets={"gate": md.Target((64, 32), "0")})
    with pytest.raises(ValueError, match="gate: not an NVFP4 layer of this model"):
        md.check(recorded, nvfp4_mlp())


def test_newer_formats_and_quantizers_are_refused(saved: Path) -> None:
    edit(saved, format_version=2)
    with pytest.raises(ValueError, match="has format 2, this halfbyte reads up to 1"):
        md.read(saved)
    edit(saved, format_version=1, quantizer={"rounding": "dither", "scales": "keep", "seed": 0, "version": 9})
    with pytest.raises(ValueError, match="trained for quantizer 9"):
        md.read(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"mode": "half"},
        {"base_digest": "0"},
        {"targets": {"up": {}}},
        {"targets": 3},
        {"format_version": "x"},
        {"quantizer": {"rounding": "up"}},
        {"quantizer": {"dtype": "decimal"}},
        {"quantizer": {"unknown": 1}},
        {"overrides": None},
    ],
)
def test_damage_is_found(saved: Path, changes: dict[str, Any]) -> None:
    edit(saved, **changes)
    with pytest.raises(ValueError, match=r"adapter_config\.json: the halfbyte key"):
        md.read(saved)


def test_files_that_are_not_there_or_not_ours(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the folder of a PEFT adapter"):
        md.read(tmp_path)
    with_lora(nvfp4_mlp()).save_pretrained(tmp_path)
    assert md.read(tmp_path) is None
    assert load_adapter(nvfp4_mlp(), tmp_path)(X).shape == (5, 8)
    (tmp_path / md.CONFIG_NAME).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        md.read(tmp_path)


@pytest.mark.parametrize("rounding, scales", [("dither", "keep"), ("nearest", "fresh")])
def test_a_merge_aware_adapter_loads_as_one(tmp_path: Path, rounding: Any, scales: Any) -> None:
    """With its rounding, seed and dtype, also on a base in another dtype; the recorded digest is that of its W'."""
    model = make_merge_aware(with_lora(nvfp4_mlp()), rounding=rounding, scales=scales, seed=11, dtype=torch.bfloat16)
    save_adapter(model, tmp_path, start_step=5)
    recorded = md.read(tmp_path)
    assert recorded.mode == "merge-aware" and recorded.start_step == 5
    assert recorded.quantizer == md.Quantizer(rounding, scales, 11, "bfloat16")
    loaded = load_adapter(nvfp4_mlp().to(torch.float16), tmp_path)
    assert merged_digest(loaded) == recorded.merged_digest == merged_digest(model)
    assert all(layer.recipe.dtype == torch.bfloat16 for layer in merge_aware_layers(loaded).values())
    assert len(nvfp4_modules(loaded)) == 2
