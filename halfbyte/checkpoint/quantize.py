"""`quantize_checkpoint`: a dense checkpoint to NVFP4, one tensor at a time, into a folder that appears when complete.

Everything is planned from the headers (which layers, which keys, how large), then each weight is read, quantized,
measured, written and dropped: peak memory is a few tensors, far below a shard. Layers that a serving engine fuses share
one tensor scale, so their weights are read twice: once for the common maximum, once to be encoded.
"""

import difflib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.detect import CONFIG_FILE, FORMATS
from halfbyte.checkpoint.finite import check_finite
from halfbyte.checkpoint.formats.base import Format, StoredWeight
from halfbyte.checkpoint.fused import fused_groups
from halfbyte.checkpoint.output import atomic_folder
from halfbyte.checkpoint.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter, parse_size
from halfbyte.checkpoint.sidecar import write_json, write_record
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.source import DenseSource, open_source
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts, row_chunks
from halfbyte.nvfp4.linear import ActivationQuant
from halfbyte.nvfp4.quantize import largest_magnitude, quantize
from halfbyte.nvfp4.scaling import LARGEST_BLOCK_SCALE, global_scale_for

Progress = Callable[[int, int, str], None]  # bytes done, bytes in total, what is being done
DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ACTIVATIONS = {"none": None, "dynamic": ActivationQuant(scale=None)}


@dataclass(frozen=True)
class QuantizedLayer:
    """One line of the report. Errors are ||W - Q(W)|| / ||W||; plain_error is that of `scales="max"`."""

    fqn: str
    shape: tuple[int, int]
    error: float
    plain_error: float


@dataclass(frozen=True)
class QuantizeReport:
    """What was done. dense: linear layers that stayed as they were -> why."""

    layers: list[QuantizedLayer]
    dense: dict[str, str]
    size_before: int
    size_after: int
    scales: str

    @property
    def mean_error(self) -> float:
        return sum(layer.error for layer in self.layers) / len(self.layers)

    @property
    def worst(self) -> QuantizedLayer:
        return max(self.layers, key=lambda layer: layer.error)


def quantize_checkpoint(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    exclude: Sequence[str] = (),
    scales: str = "max",
    activations: str = "none",
    lm_head: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Write `src` to `out` as an NVFP4 checkpoint in torchao's format.

    src          a Hugging Face folder (bf16, fp16, fp32), a Hub id, or a .gguf file.
    exclude      patterns (`model.layers.0.*`, `o_proj`) of layers that stay dense; each must match something.
    scales       "max" or "four-over-six" (halfbyte.nvfp4.quantize).
    activations  "none" (weight-only) or "dynamic" (W4A4).
    lm_head      True quantizes the output layer too.
    memory       a few tensors.
    raises       ValueError, FileNotFoundError, FileExistsError; OSError for a full disk. `out` is then not there.
    """
    for what, value, choices in (("scales", scales, LARGEST_BLOCK_SCALE), ("activations", activations, ACTIVATIONS)):
        if value not in choices:
            raise ValueError(f"{what} is {value!r}, expected {' or '.join(choices)}.")
    max_shard_bytes = parse_size(max_shard_size)
    source = open_source(src)
    try:
        size_before = source.size_bytes
        plan = make_plan(source, exclude, lm_head, ACTIVATIONS[activations], FORMATS["torchao"])
        with atomic_folder(out) as folder:
            layers = write_weights(source, plan, folder, scales, max_shard_bytes, progress)
            write_rest(source, plan, folder, scales, layers)
    finally:
        source.close()
    size_after = sum(spec.size_bytes for spec in plan.specs.values())
    return QuantizeReport(layers, plan.dense, size_before, size_after, scales)


@dataclass(frozen=True)
class Plan:
    """What goes where, known from headers alone.

    weights  source key -> how its NVFP4 form is stored.
    copied   source keys that stay dense.
    unknown  those of them that the model of the config does not know.
    dense    names of linears that stay dense -> why.
    specs    output key -> dtype and shape, in file order.
    names    the model's names of all tensors.
    kept_out fqns of linears that stay dense, the output layer aside: transformers leaves it out by itself.
    """

    format: Format
    weights: dict[str, StoredWeight]
    copied: list[str]
    unknown: set[str]
    dense: dict[str, str]
    specs: dict[str, TensorSpec]
    names: list[str]
    kept_out: list[str]


def make_plan(
    source: DenseSource, exclude: Sequence[str], lm_head: bool, activation: ActivationQuant | None, format: Format
) -> Plan:
    """Choose the layers. ValueError when nothing is left to quantize, or a pattern matches nothing."""
    skeleton = Skeleton(source.config, source.path)
    keys = without_tied_copies(source, skeleton)
    skeleton.check_complete(keys, source.path)
    linears = skeleton.linears(keys)
    check_linears(source, skeleton, linears)
    dense = {linears[key]: reason for key, reason in reasons_to_stay_dense(source, skeleton, linears, lm_head).items()}
    dense |= excluded(linears, exclude)
    dense |= {
        target.name: "transformers fuses it while loading" for target in map(skeleton.target, keys) if target.fused
    }
    dtype = source.dense_dtype or skeleton.dtype
    weights: dict[str, StoredWeight] = {}
    specs: dict[str, TensorSpec] = {}
    for key in keys:
        spec = source.spec(key)
        if key in linears and linears[key] not in dense:
            fqn, shape = key.removesuffix(".weight"), (spec.shape[0], spec.shape[1])
            weights[key] = format.plan(fqn, linears[key], shape, activation, dtype)
            specs |= {weights[key].keys[c]: weights[key].specs[c] for c in weights[key].keys}
        else:
            specs[key] = TensorSpec(cast_dtype(spec.dtype, source.dense_dtype), spec.shape)
    if not weights:
        raise ValueError(
            f"{source.path}: no layer to quantize. Linear layers found: {len(linears)}; all stay dense: "
            f"{'; '.join(f'{fqn} ({reason})' for fqn, reason in islice(dense.items(), 3))}; ... Exclude fewer, or add "
            "--lm-head, where that is the reason; else use the model as it is."
        )
    quantized = {weight.model_fqn for weight in weights.values()}
    kept_out = [fqn for fqn in skeleton.all_linears if fqn not in {*quantized, skeleton.output_embeddings}]
    names = list(dict.fromkeys(skeleton.target(key).name for key in keys))
    copied = [key for key in keys if key not in weights]
    unknown = {key for key in copied if skeleton.can_do_without(key)}
    return Plan(format, weights, copied, unknown, dense, specs, names, kept_out)


def without_tied_copies(source: DenseSource, skeleton: Skeleton) -> list[str]:
    """Keys to write: a second copy of tied embeddings is dropped where it is one, so that one is left on disk."""
    keys = source.keys()
    by_name = {skeleton.target(key).name: key for key in keys}
    dropped = set()
    for copy, original in skeleton.model.all_tied_weights_keys.items():
        if copy not in by_name or original not in by_name:
            continue
        if torch.equal(source.read(by_name[copy]), source.read(by_name[original])):
            dropped.add(by_name[copy])
    return [key for key in keys if key not in dropped]


def check_linears(source: DenseSource, skeleton: Skeleton, linears: dict[str, str]) -> None:
    """ValueError for a linear's weight that has not the config's shape, or is in no dtype of a dense model."""
    for key, fqn in linears.items():
        spec, expected = source.spec(key), tuple(skeleton.model.get_parameter(f"{fqn}.weight").shape)
        if tuple(spec.shape) != expected:
            raise ValueError(
                f"{source.path}: {key} has shape {list(spec.shape)}, the config expects {list(expected)}. Config and "
                "weights do not belong together; take both from one checkpoint."
            )
        if spec.dtype not in DENSE_DTYPES:
            raise ValueError(
                f"{source.path}: {key} is {spec.dtype}, expected a dense model in bf16, fp16 or fp32. Is it quantized "
                "already? Give the dense original."
            )


def reasons_to_stay_dense(
    source: DenseSource, skeleton: Skeleton, linears: dict[str, str], lm_head: bool
) -> dict[str, str]:
    """Source key of a linear -> why it cannot, or by default should not, be quantized."""
    reasons = {}
    for key, fqn in linears.items():
        in_features = source.spec(key).shape[1]
        if f"{fqn}.weight" in skeleton.tied:
            reasons[key] = "tied to the embeddings"
        elif fqn == skeleton.output_embeddings and not lm_head:
            reasons[key] = "output layer"
        elif in_features % BLOCK_SIZE:
            reasons[key] = f"in_features {in_features} is not divisible by {BLOCK_SIZE}"
    return reasons


def excluded(linears: dict[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """fqn -> reason, for names (model's or checkpoint's) that a pattern matches, whole or in their last part."""
    reasons: dict[str, str] = {}
    for pattern in patterns:
        matched = [
            fqn
            for key, fqn in linears.items()
            if any(fnmatchcase(name, pattern) for name in (fqn, key.removesuffix(".weight"), fqn.rpartition(".")[2]))
        ]
        if not matched:
            candidates = sorted(set(linears.values()) | {fqn.rpartition(".")[2] for fqn in linears.values()})
            near = difflib.get_close_matches(pattern, candidates, 1) or candidates[:1]
            raise ValueError(f"exclude: {pattern!r} matches no linear layer. Did you mean {near[0]!r}?")
        reasons |= dict.fromkeys(matched, f"excluded by {pattern!r}")
    return reasons


def cast_dtype(dtype: torch.dtype, dense_dtype: torch.dtype | None) -> torch.dtype:
    return dense_dtype if dense_dtype is not None and dtype.is_floating_point else dtype


def write_weights(
    source: DenseSource, plan: Plan, folder: Path, scales: str, max_shard_bytes: int, progress: Progress | None
) -> list[QuantizedLayer]:
    """Stream every tensor into the shards."""
    stored = {weight.fqn: weight for weight in plan.weights.values()}
    metadata = plan.format.file_metadata(plan.names, stored)
    total = sum(source.spec(key).size_bytes for key in [*plan.weights, *plan.copied])
    done = 0

    def report(key: str) -> None:
        nonlocal done
        done += source.spec(key).size_bytes
        if progress is not None:
            progress(done, total, key)

    layers: list[QuantizedLayer] = []
    with ShardWriter(folder, plan.specs, metadata=metadata, max_shard_bytes=max_shard_bytes) as writer:
        for key in plan.copied:
            value = source.read(key)
            if key not in plan.unknown:
                check_finite(value, key, source.path)
            writer.write(key, value.to(plan.specs[key].dtype))
            report(key)
        for group in fused_groups(key.removesuffix(".weight") for key in plan.weights):
            amax = torch.stack([largest_magnitude(source.read(f"{fqn}.weight"), fqn) for fqn in group]).max()
            for fqn in group:
                parts, layer = quantize_layer(source.read(f"{fqn}.weight"), fqn, amax, scales)
                for key, tensor in plan.format.encode(stored[fqn], parts).items():
                    writer.write(key, tensor)
                layers.append(layer)
                report(f"{fqn}.weight")
    return layers


def quantize_layer(weight: Tensor, fqn: str, amax: Tensor, scales: str) -> tuple[NVFP4Parts, QuantizedLayer]:
    """One weight [N, K] and its line of the report; amax is the fused group's."""
    parts = quantize(weight, global_scale=global_scale_for(amax, scales=scales), name=fqn, scales=scales)
    error = plain_error = relative_error(weight, parts)
    if scales != "max":
        plain = quantize(weight, global_scale=global_scale_for(amax), name=fqn)
        plain_error = relative_error(weight, plain)
    return parts, QuantizedLayer(fqn, parts.shape, error, plain_error)


def relative_error(weight: Tensor, parts: NVFP4Parts) -> float:
    """||W - dequantize(parts)|| / ||W||, a few rows at a time; 0 for a weight of zeros."""
    wrong = total = 0.0
    for rows in row_chunks(*weight.shape):
        dense = weight[rows].float()
        decoded = dequantize(NVFP4Parts(parts.qdata[rows], parts.scale[rows], parts.global_scale), torch.float32)
        wrong += float((decoded - dense).square().sum())
        total += float(dense.square().sum())
    return (wrong / total) ** 0.5 if total else 0.0


def write_rest(source: DenseSource, plan: Plan, folder: Path, scales: str, layers: list[QuantizedLayer]) -> None:
    """config.json, the files beside the weights, and the record."""
    weights = {weight.fqn: weight for weight in plan.weights.values()}
    config = source.config_json()
    write_json(folder / CONFIG_FILE, plan.format.declare(config, weights, plan.kept_out))
    for name, content in plan.format.extra_files(config, plan.kept_out).items():
        write_json(folder / name, content)
    source.copy_sidecars(folder)
    errors = {layer.fqn: round(layer.error, 6) for layer in layers}
    write_record(folder, made_by="quantize", scales=scales, dense=plan.dense, errors=errors)
