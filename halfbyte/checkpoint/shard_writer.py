"""Write safetensors shards whose contents are planned first and filled afterwards, one tensor at a time, in any order.

Names, dtypes and shapes of a checkpoint are known before the first value is computed, so every header can be written
at once and each tensor goes straight to its place: no shard is ever held in memory, and a full disk is noticed at the
start.
"""

import errno
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.shards import INDEX_FILE, SINGLE_FILE, Shards
from halfbyte.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, TensorSpec

DEFAULT_SHARD_BYTES = 5_000_000_000


def parse_size(text: str | int) -> int:
    """Bytes from "5GB", "300MB", "10KB" or a plain number, decimal units as in transformers' max_shard_size."""
    if isinstance(text, int):
        return text
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    upper = text.strip().upper()
    for unit, factor in units.items():
        if upper.endswith(unit) and upper[: -len(unit)].strip().replace(".", "", 1).isdigit():
            return int(float(upper[: -len(unit)]) * factor)
    if upper.isdigit():
        return int(upper)
    raise ValueError(f"{text!r} is no size. Expected bytes, or a number with KB, MB or GB, such as 5GB.")


class ShardWriter:
    """`write(key, tensor)` for every planned key, then `close()`; closing with a key unwritten is an error.

    folder     where `model.safetensors`, or the numbered shards and their index, are made.
    specs      key -> TensorSpec, complete.
    metadata   put into every shard's header, beside `format: pt`.
    memory     the headers.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ):
        self._specs = dict(specs)
        self._unwritten = set(specs)
        self._place: dict[str, tuple[int, int]] = {}  # key -> (file descriptor, offset)
        self._fds: list[int] = []
        plan = plan_shards(self._specs, max_shard_bytes)
        header_metadata = {**(metadata or {}), "format": "pt"}
        try:
            for name, keys in plan.items():
                self._create(folder / name, keys, header_metadata)
        except BaseException:
            self._close_files()
            raise
        if len(plan) > 1:
            self._write_index(folder, plan)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self._close_files()

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one planned tensor; its dtype and shape must be those of the plan."""
        spec = self._specs[key]
        found = TensorSpec(tensor.dtype, tuple(tensor.shape))
        assert found == spec, f"{key}: planned as {spec}, written as {found}"
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._write_bytes(key, data.numpy().data)
        self._unwritten.discard(key)

    def copy(self, key: str, shards: Shards, source_key: str) -> None:
        """Fill one planned tensor with the bytes of another checkpoint's tensor of the same dtype and size."""
        spec, found = self._specs[key], shards.spec(source_key)
        fits = (found.dtype, found.size_bytes) == (spec.dtype, spec.size_bytes)
        assert fits, f"{key}: {spec} planned, copying {found}"
        shards.copy(source_key, *self._place[key])
        self._unwritten.discard(key)

    def close(self) -> None:
        self._close_files()
        assert not self._unwritten, f"planned but never written: {sorted(self._unwritten)[:3]}"

    def _write_bytes(self, key: str, view: memoryview) -> None:
        fd, offset = self._place[key]
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def _create(self, path: Path, keys: list[str], metadata: dict[str, str]) -> None:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._fds.append(fd)
        header: dict[str, object] = {"__metadata__": metadata}
        position = 0
        for key in keys:
            spec = self._specs[key]
            header[key] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.size_bytes],
            }
            position += spec.size_bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        if position:
            _reserve(fd, start, position)
        os.pwrite(fd, struct.pack("<Q", len(text)) + text, 0)
        for key in keys:
            self._place[key] = (fd, start + header[key]["data_offsets"][0])  # type: ignore[index]

    def _write_index(self, folder: Path, plan: dict[str, list[str]]) -> None:
        weight_map = {key: name for name, keys in plan.items() for key in keys}
        total = sum(spec.size_bytes for spec in self._specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _close_files(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _reserve(fd: int, start: int, size: int) -> None:
    """Claim the bytes now, so that a full disk is met before hours of work; where that is not offered, go on."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(fd, start, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems without it
            raise


def plan_shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> dict[str, list[str]]:
    """File name -> its keys, in the order their data lie: files are filled in the given order, then sorted as the
    safetensors library does, by dtype and name.
    """
    rank = {dtype: position for position, dtype in enumerate(DTYPES.values())}
    groups: list[list[str]] = [[]]
    used = 0
    for key, spec in specs.items():
        if groups[-1] and used + spec.size_bytes > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(key)
        used += spec.size_bytes
    total = len(groups)
    names = [SINGLE_FILE] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    return {
        name: sorted(keys, key=lambda key: (rank[specs[key].dtype], key))
        for name, keys in zip(names, groups, strict=True)
    }
