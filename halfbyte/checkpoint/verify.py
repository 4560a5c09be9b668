"""Are two folders the same model? Codes, scales and dense tensors compared across formats, streamed.

Two weights are compared at a time, since reading and comparing take turns at one core. Codes lie in the same order in
every format, so they are compared as bytes where they lie (compare.py); scales are decoded first.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from halfbyte.checkpoint.base import Base, open_base
from halfbyte.checkpoint.compare import count_unequal_bytes, same_bytes
from halfbyte.checkpoint.tensor_file import TensorSpec

THREADS = 2
CHUNK_VALUES = 1 << 22
Progress = Callable[[int, int, str], None]


@dataclass
class Verdict:
    """differences: name -> what differs; notes: what differs and cannot be otherwise, or is no part of the model."""

    num_compared: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Finding:
    """One difference, or a note."""

    text: str
    is_note: bool = False


def verify(a: str | os.PathLike[str], b: str | os.PathLike[str], progress: Progress | None = None) -> Verdict:
    """Compare two NVFP4 folders by the model's names. ValueError or FileNotFoundError for what cannot be read."""
    verdict = Verdict()
    with open_base(a) as first, open_base(b) as second:
        weights = {*first.weights, *second.weights}
        dense = {*first.dense, *second.dense, *first.fp8, *second.fp8}
        dense -= {f"{fqn}.weight" for fqn in weights}  # NVFP4 on one side: said already
        tasks = [(fqn, partial(compare_weight, first, second, fqn)) for fqn in sorted(weights)]
        tasks += [(name, partial(compare_dense, first, second, name)) for name in sorted(dense)]
        with ThreadPoolExecutor(THREADS) as pool:
            results = [(name, pool.submit(task)) for name, task in tasks]
            for done, (name, result) in enumerate(results):
                finding = result.result()
                if finding is not None:
                    (verdict.notes if finding.is_note else verdict.differences)[name] = finding.text
                if progress is not None:
                    progress(done + 1, len(results), name)
        verdict.num_compared = len(results)
        compare_kept(first, second, verdict)
    return verdict


def compare_weight(first: Base, second: Base, fqn: str) -> Finding | None:
    """One NVFP4 weight."""
    if fqn not in first.weights or fqn not in second.weights:
        return Finding(f"NVFP4 only in {first.folder if fqn in first.weights else second.folder}")
    one, two = first.weights[fqn], second.weights[fqn]
    if one.shape != two.shape:
        return Finding(f"{one.shape} and {two.shape}")
    scales = [base.format.read_scale(base.shards, base.weights[fqn]).view(torch.uint8) for base in (first, second)]
    wrong = count_unequal_bytes(first.shards, one.keys["qdata"], second.shards, two.keys["qdata"])
    if wrong:
        return Finding(f"{wrong} of {one.shape[0] * one.shape[1] // 2} bytes of qdata")
    if not same_bytes(*scales):
        return Finding(f"{int((scales[0] != scales[1]).sum())} of {scales[0].numel()} bytes of scale")
    if one.activation != two.activation:
        return Finding(f"activations: {one.activation} and {two.activation}")
    x, y = (base.format.read_global_scale(base.shards, base.weights[fqn]) for base in (first, second))
    if torch.equal(x, y):
        return None
    what = f"tensor scale {float(x):.9g} and {float(y):.9g}"
    if returns_as(x, y) or returns_as(y, x):
        return Finding(f"{what} (a reciprocal that does not return)", is_note=True)
    return Finding(what)


def returns_as(x: Tensor, y: Tensor) -> bool:
    """True when storing 1/x and turning it again gives y."""
    return bool(1 / (1 / x) == y)


def compare_dense(first: Base, second: Base, name: str) -> Finding | None:
    """One parameter that is dense, or FP8 and compared decoded."""
    one, two = dense_spec(first, name), dense_spec(second, name)
    if one is None or two is None:
        return Finding(f"only in {second.folder if one is None else first.folder}")
    if one.shape != two.shape:
        return Finding(f"{one} and {two}")
    wrong = count_unequal(first, second, name, one)
    return Finding(f"{wrong} of {math.prod(one.shape)} values ({one} and {two})") if wrong else None


def count_unequal(first: Base, second: Base, name: str, spec: TensorSpec) -> int:
    """How many values differ, read a few rows at a time: embeddings are the largest tensors of a large model.

    Equal bytes are equal values, NaN included.
    """
    rows = spec.shape[0] if spec.shape else 1
    step = max(1, CHUNK_VALUES * rows // max(1, math.prod(spec.shape)))
    wrong = 0
    for start in range(0, rows, step):
        x, y = (dense_rows(base, name, start, start + step) for base in (first, second))
        if x.dtype == y.dtype and same_bytes(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
            continue
        wide = torch.promote_types(x.dtype, y.dtype)
        wrong += int((x.to(wide) != y.to(wide)).sum())
    return wrong


def dense_spec(base: Base, name: str) -> TensorSpec | None:
    if name in base.fp8:
        return TensorSpec(base.dtype, base.shards.spec(base.fp8[name].key).shape)
    return base.shards.spec(base.dense[name]) if name in base.dense else None


def dense_rows(base: Base, name: str, start: int, stop: int) -> Tensor:
    if name in base.fp8:
        return base.fp8[name].read_rows(base.shards, base.dtype, start, stop)
    key = base.dense[name]
    return base.shards.read_rows(key, start, stop) if base.shards.spec(key).shape else base.shards.read(key)


def compare_kept(first: Base, second: Base, verdict: Verdict) -> None:
    """Scales for serving engines: a difference where both have one, a note where one lacks it."""
    for key in sorted({*first.extras, *second.extras}):
        if key in first.extras and key in second.extras:
            verdict.num_compared += 1
            one, two = first.shards.spec(key), second.shards.spec(key)
            if one != two or count_unequal_bytes(first.shards, key, second.shards, key):
                verdict.differences[key] = f"a scale for serving engines ({one} and {two})"
        else:
            owner = first if key in first.extras else second
            verdict.notes[key] = f"a scale for serving engines, only in {owner.folder}"
