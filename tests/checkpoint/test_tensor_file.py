"""safetensors' own library is the oracle, in both directions; damage must be named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.checkpoint.tensor_file import DTYPES, TensorFile

TENSORS = {
    f"t.{name}": torch.arange(24).reshape(4, 6).to(dtype)
    for name, dtype in DTYPES.items()
    if dtype != torch.float8_e8m0fnu
} | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt", "word": "wörd"})
    return tmp_path / "x.safetensors"


def test_reads_what_the_library_wrote(path: Path) -> None:
    with TensorFile(path) as file:
        assert file.metadata == {"format": "pt", "word": "wörd"}
        assert set(file.specs) == set(TENSORS)
        for key, tensor in TENSORS.items():
            read = file.read(key)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape
            assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_reads_rows(path: Path) -> None:
    with TensorFile(path) as file:
        assert torch.equal(file.read_rows("t.I32", 1, 3), TENSORS["t.I32"][1:3])
        assert torch.equal(file.read_rows("t.BF16", 3, 99), TENSORS["t.BF16"][3:])
        assert file.read_rows("t.F32", 2, 2).shape == (0, 6)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_truncated(path: Path, keep: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"x\.safetensors.*[Ff]etch"):
        TensorFile(path)


def rewrite_header(path: Path, change) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["t.F32"].update(dtype="F31"), "F31"),
        (lambda h: h["t.F32"].update(shape=[4, 7]), r"t\.F32 spans bytes"),
        (lambda h: h["t.F32"].update(shape=[-4, -6]), r"t\.F32 spans bytes"),
        (lambda h: h.pop("t.I8"), "starts at byte"),
        (lambda h: h.pop("empty") and h["t.F32"].pop("data_offsets"), "data_offsets"),
        (lambda h: h["t.F32"].update(data_offsets=h["t.I32"]["data_offsets"]), "starts at byte"),
    ],
)
def test_damaged_header(path: Path, change, message: str) -> None:
    """Overlaps and holes are refused too: the library refuses them, and a hole can smuggle bytes past a digest."""
    rewrite_header(path, change)
    with pytest.raises(ValueError, match=message):
        TensorFile(path)
