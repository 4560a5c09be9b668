"""What every NVFP4 file format must answer, so that load, quantize, merge, export and inspect know none by name.

A format finds the weights of a folder, reads one as `NVFP4Parts` (global_scale always multiplies, block scales always
row-major) and writes one back under its own keys. Whatever is peculiar to it (a swizzle, a reciprocal, a JSON per
tensor) stays inside its file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.linear import ActivationQuant

NAN_BITS = 0x7F  # E4M3 has no infinity; 0x7F and 0xFF are its NaNs


Rename = Callable[[str], str]


def same_name(name: str) -> str:
    return name


@dataclass(frozen=True)
class StoredWeight:
    """One NVFP4 weight as a folder holds it.

    fqn         the linear's name in the checkpoint, e.g. "model.layers.0.self_attn.q_proj".
    model_fqn   its name in the model; another one where transformers renames keys while loading.
    shape       (out_features, in_features).
    keys        component ("qdata", "scale", "global_scale", "act_scale") -> key; only those that exist.
    specs       component -> dtype and shape on disk.
    activation  None for weight-only, else how the layer's input is quantized.
    details     what the format needs to write the weight back the same way.
    """

    fqn: str
    model_fqn: str
    shape: tuple[int, int]
    keys: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    activation: ActivationQuant | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weight_name(self) -> str:
        """The key a dense checkpoint would use."""
        return f"{self.fqn}.weight"

    @property
    def size_bytes(self) -> int:
        return sum(spec.size_bytes for spec in self.specs.values())


class Format(Protocol):
    """One way to keep NVFP4 weights in safetensors files.

    codes_suffix  what follows a linear's name in the key of its codes.
    """

    name: str
    codes_suffix: str

    def find(self, shards: Shards, config: Mapping[str, Any], rename: Rename = same_name) -> dict[str, StoredWeight]:
        """Checkpoint's fqn -> weight, checked: complete, right dtypes and shapes, metadata present, else ValueError.

        rename  the checkpoint's name of a weight -> the model's.
        """

    def left_out(self, shards: Shards, config: Mapping[str, Any]) -> list[str]:
        """Names, or patterns, of layers that the folder declares not to be quantized."""

    def read(self, shards: Shards, stored: StoredWeight) -> NVFP4Parts:
        """The weight's parts. ValueError for a NaN scale, naming file and key."""

    def read_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        """The block scales alone, E4M3 [N, K/16], checked."""

    def read_global_scale(self, shards: Shards, stored: StoredWeight) -> Tensor:
        """The tensor scale alone, fp32 [], as it multiplies."""

    def plan(
        self,
        fqn: str,
        model_fqn: str,
        shape: tuple[int, int],
        activation: ActivationQuant | None,
        dtype: torch.dtype,
    ) -> StoredWeight:
        """How this format will store a new weight whose dense form has `dtype`."""

    def encode(self, stored: StoredWeight, parts: NVFP4Parts) -> dict[str, Tensor]:
        """Key -> tensor, with the dtypes and shapes of `stored.specs`."""

    def file_metadata(self, names: list[str], weights: Mapping[str, StoredWeight]) -> dict[str, str]:
        """Metadata for every file. names: all logical tensors, by the model's names; weights: fqn -> stored."""

    def declare(
        self, config: Mapping[str, Any], weights: Mapping[str, StoredWeight], dense_linears: list[str]
    ) -> dict[str, Any]:
        """config.json with this format's quantization block."""

    def extra_files(self, config: Mapping[str, Any], dense_linears: list[str]) -> dict[str, Any]:
        """Further JSON files of the folder, name -> content."""


def matches(name: str, pattern: str) -> bool:
    """Whether a declaration means a layer: its name, a name with `*`, or "re:" and a pattern that begins it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


def check_spec(path: Path, key: str, found: TensorSpec, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    """ValueError naming file and key unless `found` has the dtype and one of the shapes."""
    if found.dtype != dtype or found.shape not in shapes:
        expected = " or ".join(str(TensorSpec(dtype, shape)) for shape in shapes)
        raise ValueError(
            f"{path}: {key} is {found}, expected {expected}. Fetch it again, or quantize the dense original."
        )


def check_qdata(path: Path, key: str, found: TensorSpec) -> tuple[int, int]:
    """(out_features, in_features) that packed codes [N, K/2] stand for; ValueError when they cannot be NVFP4 codes."""
    if found.dtype != torch.uint8 or len(found.shape) != 2 or (2 * found.shape[1]) % BLOCK_SIZE:
        raise ValueError(
            f"{path}: {key} is {found}, expected uint8 [out_features, in_features / 2] with in_features divisible by "
            f"{BLOCK_SIZE}. (Experts stacked into one 3-D tensor are not supported; keep them one linear per expert.)"
        )
    return found.shape[0], 2 * found.shape[1]


def largest_bits(scale: Tensor) -> int:
    """The largest magnitude among block scales (E4M3, on the CPU) as its bits, which sort as magnitudes do, NaN last.

    By numpy, in this thread: files are read by threads of their own, and torch's would wait for each other.
    """
    bits = scale.view(torch.uint8).numpy()
    return int(np.bitwise_and(bits, NAN_BITS).max(initial=0))


def check_scales(path: Path, key: str, scale: Tensor) -> None:
    """ValueError for a NaN among block scales [N, K/16] (E4M3)."""
    if largest_bits(scale) == NAN_BITS:
        bad = (scale.view(torch.uint8) & NAN_BITS) == NAN_BITS
        row, col = (int(i) for i in bad.nonzero()[0])
        byte = int(scale.view(torch.uint8)[row, col])
        raise ValueError(
            f"{path}: {key} holds {int(bad.sum())} NaN block scales, the first at row {row}, block {col} "
            f"(byte 0x{byte:02X}), expected finite E4M3. The file is damaged; fetch or quantize it again."
        )


def check_global_scale(path: Path, key: str, value: Tensor) -> None:
    """ValueError unless the tensor scale is finite and not negative."""
    if not 0 <= float(value) < float("inf"):
        raise ValueError(
            f"{path}: {key} is {float(value)}, expected a finite tensor scale >= 0. The file is damaged; fetch or "
            "quantize it again."
        )
