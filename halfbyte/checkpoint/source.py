"""Dense weights to read from: a Hugging Face folder, or (gguf.py) a GGUF file, behind the same few questions."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from halfbyte.checkpoint.detect import CONFIG_FILE, detect, read_config
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.sidecar import copy_sidecars
from halfbyte.checkpoint.skeleton import load_config
from halfbyte.checkpoint.tensor_file import TensorSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DenseSource(Protocol):
    """Named dense tensors, read one at a time, and the model that they belong to."""

    path: Path
    config: "PreTrainedConfig"
    dense_dtype: torch.dtype | None  # to which floating tensors that stay dense are cast; None keeps each one's own

    def keys(self) -> list[str]:
        """In file order."""

    def spec(self, key: str) -> TensorSpec: ...

    def read(self, key: str) -> Tensor: ...

    @property
    def size_bytes(self) -> int:
        """Of the weights on disk."""

    def config_json(self) -> dict[str, Any]:
        """config.json's content."""

    def copy_sidecars(self, out: Path) -> None:
        """Tokenizer, generation config and so on, into `out`."""

    def close(self) -> None: ...


class FolderSource:
    """A folder with config.json and safetensors. ValueError when it is quantized already."""

    def __init__(self, path: Path):
        self.path = path
        self.dense_dtype: torch.dtype | None = None
        self._config_json = read_config(path)
        format = detect(path, self._config_json)
        if format is not None:
            raise ValueError(
                f"{path}: already quantized ({format.name}), expected a bf16, fp16 or fp32 model. Give the dense "
                "original."
            )
        self.config = load_config(path)
        self._shards = Shards(path)

    def keys(self) -> list[str]:
        return list(self._shards)

    def spec(self, key: str) -> TensorSpec:
        return self._shards.spec(key)

    def read(self, key: str) -> Tensor:
        return self._shards.read(key)

    @property
    def size_bytes(self) -> int:
        return self._shards.size_bytes

    def config_json(self) -> dict[str, Any]:
        return dict(self._config_json)

    def copy_sidecars(self, out: Path) -> None:
        copy_sidecars(self.path, out)

    def close(self) -> None:
        self._shards.close()


def open_source(path: str | os.PathLike[str]) -> DenseSource:
    """A folder, a Hub id, or a .gguf file. FileNotFoundError or ValueError for anything else."""
    local = local_folder(path)
    if local.is_dir():
        ggufs = sorted(local.glob("*.gguf"))
        if not (local / CONFIG_FILE).exists() and len(ggufs) == 1:
            local = ggufs[0]
        else:
            return FolderSource(local)
    if local.suffix == ".gguf":
        from halfbyte.checkpoint.gguf import GGUFSource

        return GGUFSource(local)
    raise ValueError(f"{local}: expected a Hugging Face folder or a .gguf file.")
