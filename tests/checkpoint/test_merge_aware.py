"""Adapters trained for their merged weights: the bytes that come out are those they were trained for, or it fails."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.lora import metadata as md
from halfbyte.lora import save_adapter
from halfbyte.lora.merge_aware import make_merge_aware
from tests.checkpoint.conftest import LINEAR

MODES = [(rounding, scales) for rounding in ("dither", "nearest") for scales in ("keep", "fresh")]


def trained(base: Path, folder: Path, **settings: Any) -> Path:
    """A merge-aware adapter with large factors, so that something of it also survives rounding to nearest."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, task_type="CAUSAL_LM")
    model = make_merge_aware(get_peft_model(load_model(base), config), seed=11, **settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_adapter(model, folder)
    return folder


def damaged(adapter: Path, folder: Path) -> Path:
    """Its weights are no longer those of its record."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[next(key for key in tensors if "lora_B" in key)].neg_()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def quantizer_version(adapter: Path, version: int) -> None:
    path = adapter / md.CONFIG_NAME
    config = json.loads(path.read_text())
    config[md.KEY]["quantizer"]["version"] = version
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("rounding", "scales"), MODES)
def test_the_recorded_digest_is_checked_in_every_mode(tmp_path: Path, ours: Path, rounding: Any, scales: Any) -> None:
    """Also rounding to nearest, whose report always warns; and with --any-base, when the base is the right one."""
    adapter = trained(ours, tmp_path / "a", rounding=rounding, scales=scales)
    report = merge_checkpoint(ours, adapter, tmp_path / "out", min_retained=0)
    assert (report.settings.rounding, report.settings.scales, report.settings.seed) == (rounding, scales, 11)
    wrong = damaged(adapter, tmp_path / "wrong")
    for any_base in (False, True):
        with pytest.raises(ValueError, match="weights are not those of its record"):
            merge_checkpoint(ours, wrong, tmp_path / "out2", min_retained=0, any_base=any_base)
    assert not (tmp_path / "out2").exists()


def test_it_is_not_checked_where_it_cannot_hold(tmp_path: Path, theirs: Path, ours: Path, dense: Path) -> None:
    """Another rounding, scales or seed than trained for, another base, other weights under it, no codes at all."""
    adapter, settings = trained(ours, tmp_path / "a"), {"min_retained": 0}
    for number, other in enumerate(
        [{"rounding": "nearest"}, {"scales": "fresh"}, {"seed": 12}, {"onto": dense}, {"to": "bf16"}]
    ):
        merge_checkpoint(ours, adapter, tmp_path / f"out{number}", **settings, **other)
    report = merge_checkpoint(theirs, adapter, tmp_path / "theirs", **settings, any_base=True)
    assert any("not the base" in warning for warning in report.warnings)


@pytest.mark.parametrize("version", [md.QUANTIZER_VERSION - 1, md.QUANTIZER_VERSION + 1])
def test_codes_of_another_quantizer(tmp_path: Path, ours: Path, adapter: Path, version: int) -> None:
    """Refused, or with --any-base told in the report and the merged folder; nothing where it does not matter."""
    aware, plain = trained(ours, tmp_path / "aware"), shutil.copytree(adapter, tmp_path / "plain")
    quantizer_version(aware, version)
    quantizer_version(plain, version)
    both = f"quantizer version {version}, this halfbyte has {md.QUANTIZER_VERSION}"
    with pytest.raises(ValueError, match=f"{both}.* merge it with the one that trained it .*--any-base"):
        merge_checkpoint(ours, aware, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = merge_checkpoint(ours, damaged(aware, tmp_path / "b"), tmp_path / "out", any_base=True, min_retained=0)
    assert both in report.warnings[0] and both in (tmp_path / "out" / "halfbyte.json").read_text()
    assert not merge_checkpoint(ours, plain, tmp_path / "plain out").warnings
    assert not merge_checkpoint(ours, aware, tmp_path / "bf16", to="bf16").warnings
