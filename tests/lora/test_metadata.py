"""The `halfbyte` key: PEFT ignores it, another base is an error that names what differs, damage is found."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

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


def edit_quantizer(folder: Path, **changes: Any) -> None:
    edit(folder, quantizer=json.loads((folder / md.CONFIG_NAME).read_text())[md.KEY]["quantizer"] | changes)


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


def test_newer_formats_are_refused(saved: Path) -> None:
    edit(saved, format_version=2)
    with pytest.raises(ValueError, match="has format 2, this halfbyte reads up to 1"):
        md.read(saved)


@pytest.mark.parametrize("version", [1, md.QUANTIZER_VERSION - 1, md.QUANTIZER_VERSION + 1])
def test_codes_of_another_quantizer(tmp_path: Path, version: int) -> None:
    """Older or newer, a merge-aware adapter was trained for codes that are not made here; a plain one for none."""
    save_adapter(with_lora(nvfp4_mlp()), tmp_path / "plain")
    save_adapter(make_merge_aware(with_lora(nvfp4_mlp()), seed=3), tmp_path / "aware")
    for name in ("plain", "aware"):
        edit_quantizer(tmp_path / name, version=version)
    assert torch.equal(load_adapter(nvfp4_mlp(), tmp_path / "plain")(X), with_lora(nvfp4_mlp())(X))
    assert md.read(tmp_path / "aware").quantizer.version == version  # to be shown
    both = f"quantizer version {version}, this halfbyte has {md.QUANTIZER_VERSION}"
    model = nvfp4_mlp()
    with pytest.raises(ValueError, match=rf"{both}.* Train it with this .* merge it with the one that trained it \("):
        load_adapter(model, tmp_path / "aware")
    assert not any("lora" in name for name, _ in model.named_parameters())
    loaded = load_adapter(model, tmp_path / "aware", any_base=True)
    save_adapter(loaded, tmp_path / "next")
    recorded = md.read(tmp_path / "next")
    assert recorded.quantizer.version == md.QUANTIZER_VERSION and len(recorded.overrides) == 1
    assert recorded.overrides[0].startswith("any_base: trained merge-aware") and both in recorded.overrides[0]


NOT_INTEGERS = ["3", None, 3.0, True, [3]]
DAMAGED = [
    *(({"version": value}, rf"quantizer's version is {re.escape(repr(value))}, expected an") for value in NOT_INTEGERS),
    *(({"seed": value}, rf"seed is {re.escape(repr(value))}, expected an integer") for value in NOT_INTEGERS),
    ({"dtype": "decimal"}, "'decimal' is no torch dtype"),
    ({"dtype": None}, "None is no torch dtype"),
    ({"dtype": "int8"}, "dtype is 'int8', expected a floating one"),
    ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', expected a floating one"),
    ({"rounding": ["dither"]}, r"rounding is \['dither'\], expected one of"),
    ({"scales": 1}, "scales is 1, expected one of"),
]


@pytest.mark.parametrize("mode", ["plain", "merge-aware"])
@pytest.mark.parametrize(("changes", "message"), DAMAGED)
def test_fields_of_the_quantizer_are_checked(saved: Path, mode: str, changes: dict[str, Any], message: str) -> None:
    edit(saved, mode=mode)
    edit_quantizer(saved, **changes)
    with pytest.raises(ValueError, match=rf"the halfbyte key is damaged \({message}"):
        md.read(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"seed": value}, rf"^seed is {re.escape(repr(value))}, expected an integer") for value in NOT_INTEGERS),
        ({"dtype": "bfloat16"}, "^dtype is 'bfloat16', expected a torch.dtype"),
        ({"dtype": torch.int32}, "^dtype is 'int32', expected a floating one"),
        ({"rounding": None}, "^rounding is None, expected one of"),
    ],
)
def test_make_merge_aware_checks_the_same(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_merge_aware(with_lora(nvfp4_mlp()), **changes)


def test_damaged_weights_are_found_before_the_model_is_changed(saved: Path) -> None:
    path, model = saved / "adapter_model.safetensors", nvfp4_mlp()
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors: not a safetensors file, or cut short"):
            load_adapter(model, saved)
    path.write_bytes(whole)
    tensors = load_file(path)
    for value in (float("nan"), float("inf")):
        tensors["base_model.model.up.lora_A.weight"][1, 2] = value
        save_file(tensors, path)
        with pytest.raises(ValueError, match=r"up\.lora_A\.weight holds NaN or infinite values"):
            load_adapter(model, saved)
    assert not any("lora" in name for name, _ in model.named_parameters())


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
        {"quantizer": {"rounding": "dither", "scales": "keep", "seed": 0}},
        {"quantizer": []},
        {"start_step": "5"},
        {"start_step": -1},
        {"start_step": None},
        {"merged_digest": 3},
        {"merged_digest": "0" * 64},  # of a plain adapter: its mode was changed
        {"format_version": True},
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
    (tmp_path / md.CONFIG_NAME).write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json: expected a JSON object, found list"):
        load_adapter(nvfp4_mlp(), tmp_path)


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
