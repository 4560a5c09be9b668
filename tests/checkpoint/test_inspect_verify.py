"""inspect says what is there and what is wrong; verify tells models apart across formats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.digest import streamed_digest
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.inspect import inspect_path
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.verify import verify
from halfbyte.cli.main import main
from halfbyte.lora import metadata as lora_metadata
from halfbyte.nvfp4.digest import weight_digest
from halfbyte.nvfp4.format import NVFP4Parts


def changed(source: Path, out: Path, change: Any) -> Path:
    shutil.copytree(source, out)
    with Shards(source) as shards:
        metadata = dict(shards.metadata)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata)
    return out


def run(*args: object) -> int:
    """The command line's exit code."""
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


def test_inspect_a_good_folder(ours: Path, dense: Path) -> None:
    found = inspect_path(ours)
    assert found.warnings == [] and found.facts["format"] == "torchao" and found.facts["model"] == "llama"
    assert found.facts["NVFP4 layers"].startswith("14, ") and "weight-only" in found.facts["activations"]
    assert len(found.facts["digest"]) == 64 and "made_by quantize" in found.facts["made by"]
    assert inspect_path(dense).facts["format"] == "dense"


def test_digest_is_the_same_in_every_format(tmp_path: Path, ours: Path) -> None:
    digests = {inspect_path(ours).facts["digest"]}
    for format in ("compressed-tensors", "modelopt"):
        export_checkpoint(ours, tmp_path / format, format=format, max_shard_size="8KB")
        digests.add(inspect_path(tmp_path / format).facts["digest"])
        assert verify(ours, tmp_path / format).same
    assert len(digests) == 1


Q = "model.layers.0.self_attn.q_proj._weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{Q}_scale"].view(torch.uint8)[0, 0].fill_(0x7F), "NaN block scales"),
        (lambda t: t[f"{Q}_scale"].view(torch.uint8)[0, 0].fill_(0), "1 block scales are zero"),
        (lambda t: t[f"{Q}_per_tensor_scale"].mul_(2), "1 groups that serving engines fuse have unequal tensor scales"),
        (lambda t: t[f"{Q}_per_tensor_scale"].reciprocal_(), "stored upside down"),
        (lambda t: t.pop(f"{Q}_scale"), "is in no file"),
    ],
)
def test_inspect_warns(tmp_path: Path, ours: Path, change: Any, message: str) -> None:
    found = inspect_path(changed(ours, tmp_path / "m", change))
    assert any(message in warning for warning in found.warnings), found.warnings


def test_inspect_an_adapter(tmp_path: Path, adapter: Path, ours: Path, capsys: Any) -> None:
    """Its record in rows: how a merge rounds, and the base by the digest that the base's own row begins with."""
    found = inspect_path(adapter)
    assert found.warnings == []
    assert found.facts["trained"] == "plain" and found.facts["rounding"] == "dither (when it is merged)"
    assert (found.facts["scales"], found.facts["seed"]) == ("keep", "0")
    assert found.facts["base digest"] == f"{inspect_path(ours).facts['digest'][:16]}... of 14 layers"
    assert "torch " in found.facts["versions"] and "merged digest" not in found.facts
    aware = lora_metadata.AdapterMetadata(
        mode="merge-aware",
        quantizer=lora_metadata.Quantizer(rounding="nearest", scales="fresh", seed=7, dtype="bfloat16"),
        start_step=50,
        merged_digest="ab" * 32,
        overrides=("any_base: so wished",),
    )
    shutil.copytree(adapter, tmp_path / "a")
    lora_metadata.write(tmp_path / "a", aware)
    assert run("inspect", tmp_path / "a") == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for row in (
        "trained merge-aware, from step 50 on",
        "rounding nearest, to bfloat16",
        "scales fresh",
        "seed 7",
        "merged digest abababababababab...",
        "overrides any_base: so wished",
    ):
        assert row in out
    assert "Quantizer(" not in out


def test_inspect_an_adapter_with_a_damaged_record(tmp_path: Path, adapter: Path) -> None:
    shutil.copytree(adapter, tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["halfbyte"]["mode"] = "other"
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    found = inspect_path(tmp_path / "a")
    assert found.facts["rank, alpha"] == "4, 8" and "copy the adapter again" in found.warnings[0]


def test_inspect_missing_metadata(tmp_path: Path, ours: Path) -> None:
    folder = changed(ours, tmp_path / "m", lambda tensors: None)
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    assert "no readable list tensor_names" in inspect_path(folder).warnings[0]


def test_verify_differences(tmp_path: Path, ours: Path) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}_qdata"][1, 2] ^= 1

    def norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    assert verify(ours, ours).same
    verdict = verify(ours, changed(ours, tmp_path / "code", flip))
    assert verdict.differences == {"model.layers.0.self_attn.q_proj": "1 of 2048 bytes of qdata"}
    verdict = verify(ours, changed(ours, tmp_path / "norm", norm))
    assert verdict.differences["model.norm.weight"].startswith("1 of 64 values") and len(verdict.differences) == 1


def test_digest_in_pieces_is_the_digest() -> None:
    """Any number of rows, chunks and columns; the sum over shards is the whole's."""
    for n, k in ((1, 16), (17, 48), (3000, 4096)):
        qdata = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        scale = torch.randint(1, 0x7F, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        parts = NVFP4Parts(qdata, scale, torch.tensor(0.37))
        assert streamed_digest(parts) == weight_digest(parts)


def test_command_lines(tmp_path: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", ours, tmp_path / "mo", "--format", "modelopt") == 0
    assert "14 NVFP4 layers written" in capsys.readouterr().out
    assert run("verify", ours, tmp_path / "mo") == 0 and "the same" in capsys.readouterr().out
    other = changed(ours, tmp_path / "other", lambda t: t[f"{Q}_qdata"].zero_())
    assert run("verify", other, tmp_path / "mo") == 1 and "NOT the same" in capsys.readouterr().out
    assert run("inspect", tmp_path / "mo") == 0 and "modelopt" in capsys.readouterr().out
    assert run("export", ours, tmp_path / "x", "--format", "gguf") == 2
    assert "expected torchao" in capsys.readouterr().err
