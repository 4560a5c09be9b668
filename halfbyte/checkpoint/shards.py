"""A folder of safetensors files seen as one table of tensors, whichever file each lies in.

The folder holds `model.safetensors`, or `model.safetensors.index.json` and the files it names. An index is input from a
stranger: names that leave the folder, and pickle files, are refused before anything is opened.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from torch import Tensor

from halfbyte.checkpoint.tensor_file import TensorFile, TensorSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Shards:
    """Every tensor of a checkpoint folder, by key.

    metadata  the files' safetensors metadata, merged; later files (by name) win, as in transformers.
    raises    FileNotFoundError, or ValueError naming file and key: an index that names an absent file or a path outside
              the folder, a key in two files, a key that the named file lacks.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._files: dict[str, TensorFile] = {}
        self._file_of: dict[str, str] = {}
        self.metadata: dict[str, str] = {}
        try:
            for name, keys in self._listed().items():
                self._open(name, keys)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __contains__(self, key: object) -> bool:
        return key in self._file_of

    def __iter__(self) -> Iterator[str]:
        """Keys, in the order of the files and of their data: reading them so reads the disk forward."""
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def spec(self, key: str) -> TensorSpec:
        return self._files[self._name_of(key)].specs[key]

    def path_of(self, key: str) -> Path:
        return self._files[self._name_of(key)].path

    def read(self, key: str) -> Tensor:
        return self._files[self._name_of(key)].read(key)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        return self._files[self._name_of(key)].read_rows(key, start, stop)

    def read_columns(self, key: str, start: int, stop: int) -> Tensor:
        return self._files[self._name_of(key)].read_columns(key, start, stop)

    def read_into(self, key: str, offset: int, out: Tensor) -> None:
        """Fill a uint8 tensor with the tensor's bytes from `offset` on."""
        self._files[self._name_of(key)].read_into(key, offset, out)

    def copy(self, key: str, fd: int, offset: int) -> None:
        """The tensor's bytes into an open file."""
        self._files[self._name_of(key)].copy(key, fd, offset)

    @property
    def size_bytes(self) -> int:
        return sum(self.spec(key).size_bytes for key in self)

    @property
    def largest_file_bytes(self) -> int:
        return max(file.path.stat().st_size for file in self._files.values())

    @property
    def file_names(self) -> list[str]:
        return list(self._files)

    def _name_of(self, key: str) -> str:
        if key not in self._file_of:
            raise ValueError(f"{self.folder}: key {key} is in no file of the checkpoint. Fetch it again.")
        return self._file_of[key]

    def _listed(self) -> dict[str, list[str] | None]:
        """File name -> the keys an index promises for it; None for a single file without an index."""
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"{self.folder}: no such folder. Expected a folder with {SINGLE_FILE} or {INDEX_FILE}."
            )
        if (self.folder / INDEX_FILE).exists():
            return _read_index(self.folder / INDEX_FILE)
        if (self.folder / SINGLE_FILE).exists():
            return {SINGLE_FILE: None}
        pickles = sorted(path.name for path in self.folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise ValueError(
                f"{self.folder}: found {pickles[0]}, a pickle file, which can run code when it is opened. Expected "
                "safetensors; save the model again with a current transformers."
            )
        raise FileNotFoundError(
            f"{self.folder}: found neither {SINGLE_FILE} nor {INDEX_FILE}. Give a folder with a model's weights, or "
            "fetch it again."
        )

    def _open(self, name: str, keys: list[str] | None) -> None:
        file = TensorFile(safe_path(self.folder, name))
        self._files[name] = file
        self.metadata.update(file.metadata)
        for key in file.specs:
            if key in self._file_of:
                raise ValueError(
                    f"{self.folder}: key {key} is in both {self._file_of[key]} and {name}. Fetch the checkpoint again."
                )
            self._file_of[key] = name
        absent = [key for key in keys or () if key not in file.specs]
        if absent:
            raise ValueError(
                f"{self.folder / INDEX_FILE}: says that {absent[0]} is in {name}, which does not hold it. Fetch both "
                "again."
            )


def safe_path(folder: Path, name: str) -> Path:
    """`folder / name`, refused with ValueError when it leaves the folder, is absolute, or is a pickle file.

    A symlink may point into the same folder, or from a Hub cache's `snapshots/REV` into its own `blobs`.
    """
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or not name:
        raise ValueError(
            f"{folder}: the checkpoint names the file {name!r}, which leaves its folder. Refused; fetch it from a "
            "source that you trust."
        )
    if parts.suffix in PICKLE_SUFFIXES:
        raise ValueError(
            f"{folder}: the checkpoint names {name!r}, a pickle file, which can run code. Expected safetensors; save "
            "the model again with a current transformers."
        )
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: the checkpoint names this file, but it is not there. Fetch it again.")
    target, home = path.resolve(), folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise ValueError(
            f"{path}: a link to {target}, which lies outside the checkpoint's folder. Refused; copy the file into the "
            "folder."
        )
    return path


def _read_index(path: Path) -> dict[str, list[str] | None]:
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        pairs = [(str(key), str(name)) for key, name in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: not a safetensors index (expected JSON with a weight_map): {error!r}. Fetch it again."
        ) from error
    listed: dict[str, list[str] | None] = {name: [] for name in sorted({name for _, name in pairs})}
    for key, name in pairs:
        keys = listed[name]
        assert keys is not None
        keys.append(key)
    return listed
