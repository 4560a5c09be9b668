"""`quantize_checkpoint`: the bytes against the quantizer (and torchao's), which layers, the report, what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.detect import read_config
from halfbyte.checkpoint.formats.torchao import TorchaoFormat
from halfbyte.checkpoint.fused import fused_groups
from halfbyte.checkpoint.quantize import quantize_checkpoint
from halfbyte.checkpoint.shards import Shards
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.quantize import quantize
from halfbyte.nvfp4.scaling import global_scale_for

from .conftest import save_dense, tiny_config


def read_parts(folder: Path) -> dict[str, Any]:
    with Shards(folder) as shards:
        found = TorchaoFormat().find(shards, read_config(folder))
        return {fqn: TorchaoFormat().read(shards, stored) for fqn, stored in found.items()}


def test_bytes_and_shared_scales(dense: Path, ours: Path) -> None:
    """Each weight is quantized with the scale of its fused group; that scale's reciprocal round-trips in fp32."""
    weights = load_file(dense / "model.safetensors")
    parts = read_parts(ours)
    assert len(parts) == 14
    for group in fused_groups(parts):
        amax = max(weights[f"{fqn}.weight"].abs().max() for fqn in group)
        expected = global_scale_for(amax)
        assert 1 / (1 / expected) == expected
        for fqn in group:
            reference = quantize(weights[f"{fqn}.weight"], global_scale=expected)
            assert torch.equal(parts[fqn].global_scale, expected)
            assert torch.equal(parts[fqn].qdata, reference.qdata)
            assert torch.equal(parts[fqn].scale.view(torch.uint8), reference.scale.view(torch.uint8))


def test_layers_alone_in_their_group_are_torchaos_bytes(theirs: Path, ours: Path) -> None:
    """o_proj and down_proj share with nobody; where torchao's scale round-trips we chose it, and its bytes."""
    mine, their = read_parts(ours), read_parts(theirs)
    same = 0
    for fqn in mine:
        if fqn.endswith(("o_proj", "down_proj")) and mine[fqn].global_scale == their[fqn].global_scale:
            assert torch.equal(mine[fqn].qdata, their[fqn].qdata)
            assert torch.equal(mine[fqn].scale.view(torch.uint8), their[fqn].scale.view(torch.uint8))
            same += 1
    assert same >= 2


def test_fused_groups() -> None:
    names = ["a.q_proj", "a.o_proj", "b.q_proj", "a.v_proj", "a.mlp.up_proj", "a.mlp.gate_proj", "e.0.w1", "e.0.w3"]
    assert fused_groups(names) == [
        ["a.q_proj", "a.v_proj"],
        ["a.o_proj"],
        ["b.q_proj"],
        ["a.mlp.up_proj", "a.mlp.gate_proj"],
        ["e.0.w1", "e.0.w3"],
    ]


def test_everything_else_is_carried_along(tmp_path: Path, dense: Path) -> None:
    source, blobs = tmp_path / "models--o--n" / "snapshots" / "rev", tmp_path / "models--o--n" / "blobs"
    source.mkdir(parents=True)
    blobs.mkdir()
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        shutil.copyfile(dense / name, blobs / name)
        (source / name).symlink_to(f"../../blobs/{name}")  # a Hub cache; copies must stand alone
    carried = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.txt", "spiece.model", "LICENSE"}
    for name in carried:
        (source / name).write_text(name)
    for name in ("pytorch_model.bin", "modeling_custom.py", "pytorch_model.bin.index.json"):
        (source / name).write_text("not carried")
    quantize_checkpoint(source, tmp_path / "out")
    written = {"config.json", "generation_config.json", "halfbyte.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == carried | written
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    before, after = load_file(dense / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for key in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(before[key], after[key])
    assert json.loads((tmp_path / "out" / "halfbyte.json").read_text())["scales"] == "max"


def test_a_link_out_of_the_folder_is_not_carried_along(tmp_path: Path, dense: Path) -> None:
    """It would put a file of this machine into a model that is passed on."""
    shutil.copytree(dense, tmp_path / "dense")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "dense" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"notes\.txt: a link to .*secret\.txt, which lies outside"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out")
    (tmp_path / "dense" / "notes.txt").unlink()
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.jinja").write_text("secret")
    (tmp_path / "dense" / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(ValueError, match=r"a\.jinja: a link to"):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "dense" / "additional_chat_templates").unlink()
    shutil.copytree(tmp_path / "templates", tmp_path / "dense" / "additional_chat_templates")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "a.jinja").read_text() == "secret"


def test_report(tmp_path: Path, dense: Path) -> None:
    report = quantize_checkpoint(dense, tmp_path / "out", scales="four-over-six")
    weights, parts = load_file(dense / "model.safetensors"), read_parts(tmp_path / "out")
    assert report.dense == {"lm_head": "output layer"}
    assert report.size_before == sum(w.numel() * 2 for w in weights.values())
    assert report.size_after == sum(
        w.numel() * w.itemsize for w in load_file(tmp_path / "out" / "model.safetensors").values()
    )
    for layer in report.layers:
        weight = weights[f"{layer.fqn}.weight"].double()
        decoded = dequantize(parts[layer.fqn], torch.float32).double()
        assert layer.error == pytest.approx(float((decoded - weight).norm() / weight.norm()), rel=1e-4)
        assert layer.error < layer.plain_error  # the better of two in every block; a smaller global step helps less
    assert report.worst.error == max(layer.error for layer in report.layers) >= report.mean_error


def test_lm_head_on_request(tmp_path: Path, dense: Path) -> None:
    quantize_checkpoint(dense, tmp_path / "out", lm_head=True)
    assert "lm_head" in read_parts(tmp_path / "out")


def test_many_shards_same_tensors(tmp_path: Path, dense: Path, ours: Path) -> None:
    quantize_checkpoint(dense, tmp_path / "out", max_shard_size="4KB")
    with Shards(tmp_path / "out") as shards, Shards(ours) as whole:
        assert len(shards.file_names) > 10 and set(shards) == set(whole) and shards.metadata == whole.metadata
        assert all(torch.equal(shards.read(key).float(), whole.read(key).float()) for key in shards)


def test_zero_layer_and_nan(tmp_path: Path) -> None:
    """SCENARIOS n4: zeros give finite scales and zeros back. NaN is an error with the layer's name, and no folder."""
    source = save_dense(tmp_path / "dense", tiny_config())
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    report = quantize_checkpoint(source, tmp_path / "out")
    assert min(layer.error for layer in report.layers) == 0.0
    assert not dequantize(read_parts(tmp_path / "out")["model.layers.1.self_attn.o_proj"], torch.float32).any()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: 1 of \d+ values are NaN"):
        quantize_checkpoint(source, tmp_path / "out2")
    assert {path.name for path in tmp_path.iterdir()} == {"dense", "out"}


def test_refusals(tmp_path: Path, dense: Path, ours: Path) -> None:
    def refused(error: type, message: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(error, match=message):
            quantize_checkpoint(*args, **kwargs)

    out = tmp_path / "out"
    refused(ValueError, r"'o_prj' matches no linear layer\. Did you mean 'o_proj'", dense, out, exclude=["o_prj"])
    refused(ValueError, "no layer to quantize", dense, out, exclude=["*"])
    refused(ValueError, r"already quantized \(torchao\)", ours, out)
    refused(ValueError, "scales is 'best', expected", dense, out, scales="best")
    refused(ValueError, "activations is 'static', expected none or dynamic", dense, out, activations="static")
    refused(ValueError, "'big' is no size", dense, out, max_shard_size="big")
    refused(FileNotFoundError, "no such file or folder", tmp_path / "nowhere", out)
    refused(FileExistsError, "already there", dense, ours)
    (tmp_path / "model.onnx").touch()
    refused(ValueError, "expected a Hugging Face folder or a .gguf file", tmp_path / "model.onnx", out)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[:32], r"o_proj\.weight has shape \[32, 64\], the config expects \[64, 64\]"),
        (lambda w: w[:0], r"has shape \[0, 64\]"),
        (lambda w: w.flatten(), r"has shape \[4096\]"),
        (lambda w: w.to(torch.float8_e4m3fn), r"is torch\.float8_e4m3fn, expected a dense model in bf16"),
        (lambda w: w.to(torch.int8), r"is torch\.int8, expected a dense model"),
    ],
)
def test_weights_that_are_not_the_configs(tmp_path: Path, dense: Path, change: Any, message: str) -> None:
    """Met in the headers, before anything is written."""
    shutil.copytree(dense, tmp_path / "dense")
    weights = load_file(dense / "model.safetensors")
    key = "model.layers.1.self_attn.o_proj.weight"
    weights[key] = change(weights[key]).contiguous()
    save_file(weights, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}


def test_killed_in_the_middle_then_run_again(tmp_path: Path, dense: Path, ours: Path) -> None:
    """SIGKILL while weights are being written: no folder; a rerun gives what an undisturbed run gives."""
    script = (
        "import sys, time\n"
        "from halfbyte.checkpoint.quantize import quantize_checkpoint\n"
        "quantize_checkpoint(sys.argv[1], sys.argv[2], progress=lambda *a: (print('x', flush=True), time.sleep(60)))\n"
    )
    command = [sys.executable, "-c", script, str(dense), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"x\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(dense, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (ours / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_command_line(tmp_path: Path, dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.cli.main import main

    started = time.monotonic()
    with pytest.raises(SystemExit) as left:
        main(["quantize", str(dense), str(tmp_path / "out"), "--exclude", "o_proj", "--exclude", "model.layers.0.*"])
    assert left.value.code in (0, None) and time.monotonic() - started < 60
    text = capsys.readouterr().out
    assert "model.layers.1.self_attn.o_proj (excluded by 'o_proj')" in text and "relative error, worst" in text
    assert len(read_parts(tmp_path / "out")) == 6
    with pytest.raises(SystemExit) as left:
        main(["quantize", str(dense), str(tmp_path / "out")])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "already there and not an empty folder" in error and "Traceback" not in error


def test_loads_in_plain_transformers(ours: Path, plain_load: Callable[..., Any], tokens: torch.Tensor) -> None:
    """torchao decodes our file to the very values that our decoder gives."""
    model = plain_load(ours)
    for fqn, parts in read_parts(ours).items():
        assert torch.equal(model.get_submodule(fqn).weight.dequantize(), dequantize(parts, torch.bfloat16))
