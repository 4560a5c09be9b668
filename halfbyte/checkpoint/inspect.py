"""What a folder is, and what is suspicious about it, read one weight at a time."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint import adapter as adapters
from halfbyte.checkpoint import plausible
from halfbyte.checkpoint.base import own_name
from halfbyte.checkpoint.contents import Contents, read_contents
from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.digest import streamed_digest
from halfbyte.checkpoint.finite import count_stored
from halfbyte.checkpoint.formats.base import Format
from halfbyte.checkpoint.fused import fused_groups
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.sidecar import read_record
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.lora import metadata as lora_metadata
from halfbyte.nvfp4.digest import model_digest
from halfbyte.nvfp4.linear import ActivationQuant

Progress = Callable[[int, int, str], None]
SHOWN_DIGEST = 16  # characters of an adapter's digests, as errors show them


@dataclass
class Inspection:
    """facts: name -> text, in the order to print; warnings: what a user should look at."""

    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def inspect_path(path: str | os.PathLike[str], progress: Progress | None = None) -> Inspection:
    """Look at a model's or an adapter's folder. FileNotFoundError or ValueError for what is neither."""
    folder = local_folder(path)
    if (folder / adapters.CONFIG_NAME).exists():
        return inspect_adapter(folder)
    config = read_config(folder)
    format = detect(folder, config)
    with Shards(folder) as shards:
        found = Inspection()
        found.facts["model"] = str(config.get("model_type", "unknown"))
        found.facts["format"] = format.name if format is not None else "dense"
        found.facts["files"] = f"{len(shards.file_names)}, {shards.size_bytes / 1e6:.1f} MB in {len(shards)} tensors"
        if format is not None:
            inspect_weights(found, shards, format, config, progress)
        record = read_record(folder)
        if record:
            found.facts["made by"] = ", ".join(
                f"{key} {record[key]}" for key in sorted(record) if is_short(record[key])
            )
    return found


def is_short(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def inspect_weights(
    found: Inspection, shards: Shards, format: Format, config: dict[str, Any], progress: Progress | None
) -> None:
    """The NVFP4 part: layers, bits, ranges of scales, digest, and whatever is wrong with one of them."""
    skeleton = skeleton_of(found, shards.folder)
    try:
        if skeleton is None:
            contents = read_contents(shards, format, config)
        else:
            contents = read_contents(shards, format, config, partial(own_name, skeleton), skeleton.can_do_without)
            names = [weight.weight_name for weight in contents.weights.values()]
            skeleton.check_complete([*names, *contents.fp8, *contents.dense], shards.folder)
    except ValueError as error:
        found.warnings.append(str(error))
        return
    if not contents.weights:
        found.warnings.append(f"its config says {format.name}, but it holds no NVFP4 weight")
        return
    values = sum(weight.shape[0] * weight.shape[1] for weight in contents.weights.values())
    size = sum(weight.size_bytes for weight in contents.weights.values())
    found.facts["NVFP4 layers"] = (
        f"{len(contents.weights)}, {values / 1e6:.1f} M weights at {8 * size / values:.3f} bits"
    )
    found.facts["other tensors"] = (
        f"{len(contents.dense)} dense, {len(contents.fp8)} FP8, {len(contents.auxiliary)} scales for serving engines, "
        f"{len(contents.unknown)} that the model does not know"
    )
    if contents.contradicted:
        found.warnings.append(
            f"{contents.contradicted[0]}: holds NVFP4 codes, but the config leaves it out, as engines will "
            f"({len(contents.contradicted)} such layers)"
        )
    bad = {key: f"{count} NaN or infinite values" for key in contents.dense if (count := count_stored(shards, key))}
    if bad:
        found.warnings.append(plausible.summary(bad))
    found.facts["activations"] = ", ".join(sorted({activation_text(w.activation) for w in contents.weights.values()}))
    measure_weights(found, shards, format, contents, progress)


def skeleton_of(found: Inspection, folder: Path) -> Skeleton | None:
    """The model that the config describes; None, with a warning, where transformers does not know the architecture."""
    try:
        return Skeleton.from_folder(folder)
    except ValueError as error:
        found.warnings.append(str(error))
        return None


def measure_weights(
    found: Inspection, shards: Shards, format: Format, contents: Contents, progress: Progress | None
) -> None:
    tensor_scales: dict[str, float] = {}
    digests: dict[str, tuple[tuple[int, int], int]] = {}
    zeros: dict[str, str] = {}
    doubts: dict[str, str] = {}
    low, high = float("inf"), 0.0
    for done, (fqn, weight) in enumerate(contents.weights.items()):
        if progress is not None:
            progress(done, len(contents.weights), fqn)
        try:
            parts = format.read(shards, weight)
        except ValueError as error:
            found.warnings.append(str(error))
            continue
        scale, tensor_scale = parts.scale.float(), float(parts.global_scale)
        low, high = min(low, float(scale.min())), max(high, float(scale.max()))
        num_zeros = int((scale == 0).sum())
        if num_zeros:
            zeros[fqn] = f"{num_zeros} block scales are zero, so their weights are too"
        doubt = plausible.implausible(parts.scale, parts.global_scale)
        if doubt:
            doubts[fqn] = doubt
        tensor_scales[fqn] = tensor_scale
        digests[weight.model_fqn] = (weight.shape, streamed_digest(parts))
    found.warnings += [plausible.summary(suspicious) for suspicious in (zeros, doubts) if suspicious]
    if not tensor_scales:
        return
    found.facts["block scales"] = f"{low:g} to {high:g}"
    found.facts["tensor scales"] = f"{min(tensor_scales.values()):.4g} to {max(tensor_scales.values()):.4g}"
    found.facts["digest"] = model_digest(digests)
    unequal = [group[0] for group in fused_groups(tensor_scales) if len({tensor_scales[fqn] for fqn in group}) > 1]
    if unequal:
        found.warnings.append(
            f"{len(unequal)} groups that serving engines fuse have unequal tensor scales, the first with {unequal[0]}; "
            "export with --fuse rescale"
        )


def activation_text(activation: ActivationQuant | None) -> str:
    if activation is None:
        return "none (weight-only)"
    return "dynamic" if activation.scale is None else "static"


def inspect_adapter(folder: Path) -> Inspection:
    """A LoRA adapter: PEFT's settings, and the halfbyte record."""
    found = Inspection()
    config = adapters.read_config(folder)
    found.facts["adapter"] = str(config.get("peft_type"))
    try:
        with adapters.Adapter(folder) as adapter:
            found.facts["layers"] = f"{len(adapter.layers)}, {len(adapter.modules)} parameters carried whole"
            found.facts["rank, alpha"] = f"{config['r']}, {config['lora_alpha']}"
            empty = [layer for layer in adapter.layers if not adapter.factors(layer).lora_B.any()]
            if empty:
                found.warnings.append(f"{len(empty)} of {len(adapter.layers)} layers change nothing (lora_B is zero)")
            broken = [layer for layer in adapter.layers if not torch.isfinite(adapter.factors(layer).lora_B).all()]
            if broken:
                found.warnings.append(f"{broken[0]}: lora_B holds NaN or infinite values")
    except (ValueError, FileNotFoundError) as error:
        found.warnings.append(str(error))
    try:
        recorded = lora_metadata.read(folder)
    except ValueError as error:
        found.warnings.append(str(error))
        return found
    if recorded is None:
        found.warnings.append(
            "no record of its base (not made by halfbyte): a merge cannot check that the base is right"
        )
    else:
        found.facts |= record_facts(recorded)
    return found


def record_facts(recorded: lora_metadata.AdapterMetadata) -> dict[str, str]:
    """What a merge will go by, a row each: how it was trained, how it is rounded, for which base, and what made it."""
    quantizer, merge_aware = recorded.quantizer, recorded.mode == "merge-aware"
    rounding = quantizer.rounding if quantizer.rounding == "dither" else f"{quantizer.rounding}, to {quantizer.dtype}"
    facts = {
        "trained": f"merge-aware, from step {recorded.start_step} on" if merge_aware else recorded.mode,
        "rounding": rounding if merge_aware else f"{rounding} (when it is merged)",
        "scales": quantizer.scales,
        "seed": str(quantizer.seed),
        "quantizer": f"version {quantizer.version}",
        "base digest": f"{recorded.base_digest[:SHOWN_DIGEST]}... of {len(recorded.targets)} layers",
    }
    if recorded.merged_digest is not None:
        facts["merged digest"] = f"{recorded.merged_digest[:SHOWN_DIGEST]}..."
    if recorded.overrides:
        facts["overrides"] = "; ".join(recorded.overrides)
    if recorded.versions:
        facts["versions"] = ", ".join(f"{package} {version}" for package, version in sorted(recorded.versions.items()))
    return facts
