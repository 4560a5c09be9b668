"""Folders: what we write, safetensors reads, byte for byte; what a hostile or damaged index says is refused by name."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halfbyte.checkpoint.shard_writer import ShardWriter, parse_size
from halfbyte.checkpoint.shards import INDEX_FILE, Shards
from halfbyte.checkpoint.tensor_file import TensorSpec

TENSORS = {
    "b.codes": torch.arange(40, dtype=torch.uint8).reshape(5, 8),
    "a.scale": torch.tensor(1.5),
    "a.weight": torch.randn(3, 4, dtype=torch.bfloat16),
    "c.empty": torch.zeros(0, 2),
    "c.odd": torch.arange(3, dtype=torch.uint8),
    "c.flags": torch.tensor([True, False]),
    "b.scale": torch.arange(3).to(torch.float8_e4m3fn),
    "b.half": torch.arange(3).to(torch.float16),
}
SPECS = {key: TensorSpec(tensor.dtype, tuple(tensor.shape)) for key, tensor in TENSORS.items()}


def write(folder: Path, max_shard_bytes: int) -> None:
    folder.mkdir()
    with ShardWriter(folder, SPECS, metadata={"note": "x"}, max_shard_bytes=max_shard_bytes) as writer:
        for key in reversed(TENSORS):
            writer.write(key, TENSORS[key])


@pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(10**6, 1), (30, 3), (1, 8)])
def test_writes_what_the_library_reads(tmp_path: Path, max_shard_bytes: int, num_files: int) -> None:
    write(tmp_path / "m", max_shard_bytes)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) == num_files
    loaded = {}
    for file in files:
        loaded |= load_file(file)
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"note": "x", "format": "pt"}
    assert loaded.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert loaded[key].dtype == tensor.dtype and torch.equal(loaded[key].float(), tensor.float())
    with Shards(tmp_path / "m") as shards:
        assert set(shards) == set(TENSORS)
        assert all(torch.equal(shards.read(key).float(), tensor.float()) for key, tensor in TENSORS.items())
    if num_files > 1:
        index = json.loads((tmp_path / "m" / INDEX_FILE).read_text())
        assert index["weight_map"].keys() == TENSORS.keys()
        assert index["metadata"]["total_size"] == sum(spec.size_bytes for spec in SPECS.values())


def test_one_file_is_the_librarys_byte_for_byte(tmp_path: Path) -> None:
    """With one metadata entry (the library shuffles several) and no zero-size tensor the whole file must agree."""
    tensors = {key: tensor for key, tensor in TENSORS.items() if tensor.numel()}
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    with ShardWriter(tmp_path, {key: SPECS[key] for key in tensors}) as writer:
        for key, tensor in tensors.items():
            writer.write(key, tensor)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


@pytest.mark.parametrize("kernel", [True, False])
def test_copies_between_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    """Through the kernel, and where it has no copy_file_range between the two file systems."""

    def refuse(*args: object) -> int:
        raise OSError(errno.EXDEV, "other file system")

    if not kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    write(tmp_path / "a", 30)
    (tmp_path / "b").mkdir()
    with Shards(tmp_path / "a") as shards, ShardWriter(tmp_path / "b", SPECS) as writer:
        for key in shards:
            writer.copy(key, shards, key)
    loaded = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(loaded[key].float(), tensor.float()) for key, tensor in TENSORS.items())


def test_unwritten_tensor_is_our_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"never written.*a\.scale"), ShardWriter(tmp_path, SPECS) as writer:
        for key in TENSORS.keys() - {"a.scale"}:
            writer.write(key, TENSORS[key])


def edit_index(folder: Path, change) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index["weight_map"])
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("../secret.safetensors", ValueError, "leaves its folder"),
        ("/etc/secret.safetensors", ValueError, "leaves its folder"),
        ("pytorch_model.bin", ValueError, "pickle"),
        ("link.safetensors", ValueError, "outside the checkpoint's folder"),
        ("absent.safetensors", FileNotFoundError, r"absent\.safetensors: the checkpoint names this file"),
    ],
)
def test_hostile_index(tmp_path: Path, name: str, error: type, message: str) -> None:
    write(tmp_path / "m", 30)
    save_file({"a.scale": torch.zeros(())}, tmp_path / "secret.safetensors")
    (tmp_path / "m" / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    edit_index(tmp_path / "m", lambda weight_map: weight_map.update({"a.scale": name}))
    with pytest.raises(error, match=message):
        Shards(tmp_path / "m")


def test_index_promises_a_key_the_file_lacks(tmp_path: Path) -> None:
    write(tmp_path / "m", 30)
    edit_index(tmp_path / "m", lambda weight_map: weight_map.update({"ghost": weight_map["a.scale"]}))
    with pytest.raises(ValueError, match=r"ghost is in model-0000\d-of-00003"):
        Shards(tmp_path / "m")


def test_key_in_two_files(tmp_path: Path) -> None:
    write(tmp_path / "m", 30)
    save_file({"a.scale": torch.zeros(())}, tmp_path / "m" / "more.safetensors")
    edit_index(tmp_path / "m", lambda weight_map: weight_map.update({"a.scale": "more.safetensors"}))
    with pytest.raises(ValueError, match=r"a\.scale is in both"):
        Shards(tmp_path / "m")


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "rev", tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TENSORS, blobs / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    with Shards(snapshot) as shards:
        assert len(shards) == len(TENSORS)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Shards(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="neither"):
        Shards(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="pickle"):
        Shards(tmp_path)


def test_parse_size() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "10", 7, "2KiB")] == [5 * 10**9, 1_500_000, 10, 7, 2048]
    with pytest.raises(ValueError, match="no size"):
        parse_size("many")
