"""Adapters that cannot be merged, or are damaged: one sentence each, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.merge import merge_checkpoint


def edited(adapter: Path, out: Path, **changes: Any) -> Path:
    shutil.copytree(adapter, out)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is set: DoRA"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "a bias in lora_B"),
        ({"peft_type": "IA3"}, "peft_type is IA3, expected LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "moved part of the base into the adapter"),
        ({"trainable_token_indices": [1]}, "trained token embeddings"),
        ({"layer_replication": [[0, 1]]}, "layer replication"),
        ({"r": 8}, r"has lora_A \[4, .* gives it rank 8"),
        ({"r": None}, "r is None"),
        ({"r": 0}, "r is 0 .* expected numbers, r >= 1"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"lora_alpha": "8"}, "lora_alpha 8, expected numbers"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*, expected a number by layer name"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is .* ranks >= 1"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern is .*, expected a number"),
        ({"halfbyte": {"format_version": 99}}, "Update halfbyte"),
    ],
)
def test_adapters_that_cannot_be_merged(
    tmp_path: Path, ours: Path, adapter: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(ours, edited(adapter, tmp_path / "a", **changes), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def change_weights(adapter: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(adapter, out)
    tensors = load_file(out / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, out / "adapter_model.safetensors")
    return out


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for key in [key for key in tensors if old in key]:
        tensors[key.replace(old, new)] = tensors.pop(key)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "q_proj has no lora_B"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(3)}), "variant"),
        (lambda t: t[f"{Q}.lora_A.weight"].fill_(float("nan")), "q_proj: the adapter holds NaN"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 32)}),
            r"do not multiply to the base weight",
        ),
        (lambda t: t.update({f"{Q}.lora_B.weight": torch.ones(64, 4, dtype=torch.int32)}), "factors in torch.int32"),
        (lambda t: t.update({"model.x": torch.ones(3)}), "does not start with base_model"),
        (lambda t: t.update({"base_model.model.extra.weight": torch.ones(3)}), r"changes extra\.weight, which"),
        (
            lambda t: rename(t, "layers.1", "layers.7"),
            r"changes model\.layers\.7\..* and 6 more, which .* does not have",
        ),
        (lambda t: t.clear(), "holds no LoRA factors"),
    ],
)
def test_damaged_adapters(tmp_path: Path, ours: Path, adapter: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(ours, change_weights(adapter, tmp_path / "a", change), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
