"""One safetensors file, read with `pread`: a header that is checked before it is believed, then exact byte ranges.

`safetensors.safe_open` maps the file, and pages of a mapped file count as resident memory, so whatever is converted on
the way (to another dtype, out of a swizzle) costs its size twice. Reading into fresh memory costs the tensor alone
(benchmarks/load_peak.py), reads single rows, and hands back raw bytes where a copy must be exact. The format is an
8-byte length, a JSON header and the data (https://huggingface.co/docs/safetensors); the tests compare with the library
in both directions.
"""

import errno
import json
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
COPY_BYTES = 1 << 24

# In the order in which the library lays tensors out in a file: wide ones first keeps each aligned to its dtype.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """What a header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class TensorFile:
    """A safetensors file, open for reading.

    raises  FileNotFoundError for an absent file, ValueError naming the file when it is cut short or not safetensors.
    memory  the header; a read allocates the tensor it returns and nothing else.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY)
        try:
            self.specs, self._offsets, self.metadata = self._parse_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(self, key: str) -> Tensor:
        """The whole tensor, in memory of its own."""
        spec = self.specs[key]
        flat = self._read_bytes(key, 0, spec.size_bytes)
        return flat.view(spec.dtype).reshape(spec.shape)

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) along dim 0."""
        spec = self.specs[key]
        shape = (max(0, min(stop, spec.shape[0]) - start), *spec.shape[1:])
        row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        flat = self._read_bytes(key, start * row_bytes, math.prod(shape) * spec.dtype.itemsize)
        return flat.view(spec.dtype).reshape(shape)

    def copy(self, key: str, fd: int, offset: int) -> None:
        """Copy the tensor's bytes to another file without bringing them here, where the kernel can."""
        size, done = self.specs[key].size_bytes, 0
        while done < size:
            step = min(COPY_BYTES, size - done)
            count = _copy_range(self._fd, fd, step, self._offsets[key] + done, offset + done)
            if count == 0:
                raise ValueError(
                    f"{self.path}: {key} ends after {done} of {size} bytes. The file was cut; fetch it again."
                )
            done += count

    def read_columns(self, key: str, start: int, stop: int) -> Tensor:
        """Columns [start, stop) of a matrix; one read for each row, of these bytes alone."""
        spec = self.specs[key]
        (rows, columns), item = spec.shape, spec.dtype.itemsize
        out = torch.empty(rows, (stop - start) * item, dtype=torch.uint8)
        for row in range(rows if stop > start else 0):
            self.read_into(key, (row * columns + start) * item, out[row])
        return out.view(spec.dtype)

    def read_into(self, key: str, offset: int, out: Tensor) -> None:
        """Fill a uint8 tensor with the tensor's bytes from `offset` on."""
        view, size, position, done = out.numpy().data, out.numel(), self._offsets[key] + offset, 0
        while done < size:
            count = os.preadv(self._fd, [view[done:]], position + done)
            if count == 0:
                raise ValueError(
                    f"{self.path}: {key} ends after {done} of {size} bytes. The file was cut; fetch it again."
                )
            done += count

    def _read_bytes(self, key: str, offset: int, size: int) -> Tensor:
        """A fresh uint8 tensor [size] from the file."""
        out = torch.empty(size, dtype=torch.uint8)
        self.read_into(key, offset, out)
        return out

    def _parse_header(self) -> tuple[dict[str, TensorSpec], dict[str, int], dict[str, str]]:
        file_bytes = os.fstat(self._fd).st_size
        head = os.pread(self._fd, 8, 0)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(
                f"{self.path}: not a safetensors file, or cut short: found {file_bytes} bytes whose first 8 announce a "
                f"header of {length}. Fetch the file again."
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            metadata = header.pop("__metadata__", None) or {}
            specs, offsets, end = _parse_entries(header, data_start=8 + length, path=self.path)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path}: damaged safetensors header: {error}. Fetch the file again.") from error
        if end != file_bytes:
            raise ValueError(
                f"{self.path}: found {file_bytes} bytes, but its header describes {end}. The file was cut or appended "
                "to; fetch it again."
            )
        return specs, offsets, metadata


def _copy_range(source: int, target: int, size: int, source_offset: int, target_offset: int) -> int:
    """copy_file_range, or a read and a write where the system or the pair of file systems has no such thing."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, size, source_offset, target_offset)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
                raise
    data = os.pread(source, size, source_offset)
    return os.pwrite(target, data, target_offset) if data else 0


def _parse_entries(header: dict, *, data_start: int, path: Path) -> tuple[dict[str, TensorSpec], dict[str, int], int]:
    """Specs, absolute offsets and the end of the data; the ranges must tile the data, as the format demands."""
    specs: dict[str, TensorSpec] = {}
    offsets: dict[str, int] = {}
    for key, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{key} has dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}")
        spec = TensorSpec(DTYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"]))
        start, end = entry["data_offsets"]
        if any(size < 0 for size in spec.shape) or start < 0 or end - start != spec.size_bytes:
            raise ValueError(f"{key} spans bytes {start} to {end}, but {spec} needs {spec.size_bytes}")
        specs[key], offsets[key] = spec, data_start + start
    position = data_start
    for key in sorted(specs, key=lambda key: (offsets[key], specs[key].size_bytes)):
        if offsets[key] != position:
            raise ValueError(f"{key} starts at byte {offsets[key]}, expected {position}")
        position += specs[key].size_bytes
    return specs, offsets, position
