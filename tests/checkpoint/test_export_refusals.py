"""Folders in the other formats that are damaged or wrongly declared, and exports that cannot be: one sentence each."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoint.detect import read_config
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.shards import Shards


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [
        ("modelopt", lambda t: t.pop("F.weight_scale"), r"F\.weight_scale is in no file, but F needs it"),
        ("modelopt", lambda t: t.pop("F.weight_scale_2"), r"F\.weight_scale_2 is in no file"),
        ("modelopt", lambda t: t["F.weight_scale"].view(torch.uint8)[1, 1].fill_(0x7F), "1 NaN block scales"),
        ("modelopt", lambda t: t.update({"F.weight_scale_2": torch.tensor(float("inf"))}), "is inf, expected a finite"),
        ("modelopt", lambda t: t.update({"F.pre_quant_scale": torch.ones(64)}), "belongs to AWQ, whose layers"),
        ("compressed-tensors", lambda t: t.pop("F.weight_global_scale"), r"F\.weight_global_scale is in no file"),
        ("compressed-tensors", lambda t: t["F.weight_global_scale"].zero_(), "is inf, expected a finite"),
        (
            "compressed-tensors",
            lambda t: t.update({"F.weight_scale": torch.zeros(3)}),
            r"float32 \[3\], expected float8",
        ),
    ],
)
def test_damage(tmp_path: Path, folders: dict[str, Path], format: str, change: Any, message: str) -> None:
    fqn = "model.layers.0.self_attn.q_proj"
    shutil.copytree(folders[format], tmp_path / "m")
    with Shards(folders[format]) as shards:
        tensors = {key.replace(fqn, "F"): shards.read(key) for key in shards}
    change(tensors)
    for path in (tmp_path / "m").glob("model*"):
        path.unlink()
    save_file({key.replace("F.", f"{fqn}."): t for key, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match=re.sub(r"\bF\b", fqn, message)):
        load_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("modelopt", {"quant_algo": "FP8"}, "quant_algo is FP8, expected NVFP4"),
        ("compressed-tensors", {"config_groups": None}, "no config_groups"),
        ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is set"),
        ("compressed-tensors", {"config_groups": {"g": {"targets": ["Linear"], "weights": {}}}}, "no 4-bit group"),
    ],
)
def test_wrong_declarations(
    tmp_path: Path, folders: dict[str, Path], format: str, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(folders[format], tmp_path / "m")
    config = read_config(tmp_path / "m")
    config["quantization_config"] |= changes
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "hf_quant_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m")


def test_refusals(tmp_path: Path, ours: Path, dense: Path) -> None:
    for kwargs, message in (
        ({"format": "gguf"}, "format is 'gguf', expected torchao, compressed-tensors, modelopt"),
        ({"format": "modelopt", "fuse": "ignore"}, "fuse is 'ignore', expected refuse, rescale"),
        ({"format": "modelopt", "activations": "x"}, "activations is 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            export_checkpoint(ours, tmp_path / "out", **kwargs)
    with pytest.raises(ValueError, match="found a dense model"):
        export_checkpoint(dense, tmp_path / "out", format="modelopt")
