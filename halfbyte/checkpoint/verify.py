"""Are two folders the same model? Codes, scales and dense tensors compared across formats, one tensor at a time."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfbyte.checkpoint.base import Base, open_base
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.format import NVFP4Parts

CHUNK_VALUES = 1 << 24
Progress = Callable[[int, int, str], None]


@dataclass
class Verdict:
    """differences: name -> what differs; notes: what differs and cannot be otherwise."""

    num_compared: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not self.differences


def verify(a: str | os.PathLike[str], b: str | os.PathLike[str], progress: Progress | None = None) -> Verdict:
    """Compare two NVFP4 folders by the model's names. ValueError or FileNotFoundError for what cannot be read."""
    verdict = Verdict()
    with open_base(a) as first, open_base(b) as second:
        compare_weights(first, second, verdict, progress)
        compare_dense(first, second, verdict)
    return verdict


def compare_weights(first: Base, second: Base, verdict: Verdict, progress: Progress | None) -> None:
    names = [*first.weights, *(fqn for fqn in second.weights if fqn not in first.weights)]
    for done, fqn in enumerate(names):
        if progress is not None:
            progress(done, len(names), fqn)
        verdict.num_compared += 1
        if fqn not in first.weights or fqn not in second.weights:
            verdict.differences[fqn] = f"NVFP4 only in {first.folder if fqn in first.weights else second.folder}"
            continue
        one, two = first.weights[fqn], second.weights[fqn]
        if one.shape != two.shape:
            verdict.differences[fqn] = f"{one.shape} and {two.shape}"
            continue
        compare_parts(fqn, first.format.read(first.shards, one), second.format.read(second.shards, two), verdict)
        if one.activation != two.activation:
            verdict.differences[fqn] = f"activations: {one.activation} and {two.activation}"


def compare_parts(fqn: str, one: NVFP4Parts, two: NVFP4Parts, verdict: Verdict) -> None:
    for name, x, y in zip(NVFP4Parts._fields[:2], one[:2], two[:2], strict=True):
        x, y = x.view(torch.uint8), y.view(torch.uint8)
        if not same_bytes(x, y):
            verdict.differences[fqn] = f"{int((x != y).sum())} of {x.numel()} bytes of {name}"
            return
    if not torch.equal(one.global_scale, two.global_scale):
        what = f"tensor scale {float(one.global_scale):.9g} and {float(two.global_scale):.9g}"
        turned = returns_as(one.global_scale, two.global_scale) or returns_as(two.global_scale, one.global_scale)
        (verdict.notes if turned else verdict.differences)[fqn] = what


def same_bytes(x: Tensor, y: Tensor) -> bool:
    """Equality of two uint8 tensors of one shape, eight bytes at a time where that divides."""
    x, y = x.reshape(-1), y.reshape(-1)
    if x.numel() % 8 == 0:
        x, y = x.view(torch.int64), y.view(torch.int64)
    return torch.equal(x, y)


def returns_as(x: Tensor, y: Tensor) -> bool:
    """True when storing 1/x and turning it again gives y."""
    return bool(1 / (1 / x) == y)


def compare_dense(first: Base, second: Base, verdict: Verdict) -> None:
    for name in sorted({*first.dense, *second.dense, *first.fp8, *second.fp8}):
        if name.removesuffix(".weight") in {*first.weights, *second.weights}:
            continue  # NVFP4 on one side: said already
        verdict.num_compared += 1
        one, two = dense_spec(first, name), dense_spec(second, name)
        if one is None or two is None:
            verdict.differences[name] = f"only in {second.folder if one is None else first.folder}"
        elif one.shape != two.shape:
            verdict.differences[name] = f"{one} and {two}"
        else:
            wrong = count_unequal(first, second, name, one)
            if wrong:
                verdict.differences[name] = f"{wrong} of {math.prod(one.shape)} values ({one} and {two})"


def count_unequal(first: Base, second: Base, name: str, spec: TensorSpec) -> int:
    """How many values differ, read a few rows at a time: embeddings are the largest tensors of a large model."""
    rows = spec.shape[0] if spec.shape else 1
    step = max(1, CHUNK_VALUES * rows // max(1, math.prod(spec.shape)))
    wrong = 0
    for start in range(0, rows, step):
        x, y = (dense_rows(base, name, start, start + step) for base in (first, second))
        wide = torch.promote_types(x.dtype, y.dtype)
        wrong += int((x.to(wide) != y.to(wide)).sum())
    return wrong


def dense_spec(base: Base, name: str) -> TensorSpec | None:
    if name in base.fp8:
        return TensorSpec(base.dtype, base.shards.spec(base.fp8[name].key).shape)
    return base.shards.spec(base.dense[name]) if name in base.dense else None


def dense_rows(base: Base, name: str, start: int, stop: int) -> Tensor:
    if name in base.fp8:
        return base.fp8[name].read(base.shards, base.dtype)[start:stop]
    key = base.dense[name]
    return base.shards.read_rows(key, start, stop) if base.shards.spec(key).shape else base.shards.read(key)
