"""`export_checkpoint`: an NVFP4 folder in another of the three formats, streamed; codes never change.

Block scales change only where a fused group is rescaled on request, a tensor scale only where the target stores its
reciprocal and that does not come back (one fp32 in six), or where a group was rescaled. The report says both.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte.checkpoint import plausible
from halfbyte.checkpoint.base import Base, open_base, tied_copies
from halfbyte.checkpoint.detect import CONFIG_FILE, FORMATS, read_json
from halfbyte.checkpoint.formats.base import Format, StoredWeight
from halfbyte.checkpoint.formats.modelopt import QUANT_FILE
from halfbyte.checkpoint.fused import fused_groups
from halfbyte.checkpoint.output import atomic_folder
from halfbyte.checkpoint.quantize import Progress, relative_error
from halfbyte.checkpoint.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter, parse_size
from halfbyte.checkpoint.sidecar import copy_sidecars, read_record, write_json, write_record
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.linear import ActivationQuant

RECIPROCAL = ("compressed-tensors",)  # formats that store 1 / tensor scale
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")
FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
FUSES = ("refuse", "rescale")
ACTIVATIONS = ("keep", "none")


@dataclass
class ExportReport:
    """moved_scales: fqn -> relative change of a tensor scale whose reciprocal does not return; rescaled: fqn -> error
    added to the weight, ||W' - W|| / ||W||; notices: for the user's eyes."""

    format: str
    num_layers: int = 0
    moved_scales: dict[str, float] = field(default_factory=dict)
    rescaled: dict[str, float] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def export_checkpoint(
    src: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str,
    fuse: str = "refuse",
    activations: str = "keep",
    max_shard_size: str | int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the NVFP4 folder `src` to `out` in `format`.

    format       "torchao", "compressed-tensors" or "modelopt".
    fuse         q/k/v or gate/up with unequal tensor scales: "refuse" (serving engines take the largest and are
                 silently wrong), or "rescale" block scales to the largest.
    activations  "keep", or "none" for a weight-only file.
    memory       a few tensors.
    raises       ValueError naming the layer: an unequal group, activations that the format cannot say.
    """
    choices = {"format": (format, FORMATS), "fuse": (fuse, FUSES), "activations": (activations, ACTIVATIONS)}
    for what, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{what} is {value!r}, expected {', '.join(known)}.")
    max_shard_bytes = parse_size(max_shard_size)
    with open_base(src) as base:
        exporter = Exporter(base, FORMATS[format], fuse, activations)
        with atomic_folder(out) as folder:
            exporter.write(folder, max_shard_bytes, progress)
    return exporter.report


class Exporter:
    """One export: plans every key from the headers and the tensor scales, then streams."""

    def __init__(self, base: Base, target: Format, fuse: str, activations: str):
        self.base, self.target = base, target
        self.report = ExportReport(target.name, num_layers=len(base.weights))
        self.doubts: dict[str, str] = {}  # fqn -> what is suspicious about its scales
        self.tied = tied_copies(base)
        self.dense = {name: key for name, key in base.dense.items() if name not in self.tied}
        self.planned = {fqn: self.plan(fqn, weight, activations) for fqn, weight in base.weights.items()}
        self.shared = {} if target.name == "torchao" and fuse == "refuse" else self.shared_scales(fuse)
        if base.fp8:
            self.report.notices.append(f"{len(base.fp8)} FP8 layers are written dense ({base.dtype}).")
        if self.tied:
            self.report.notices.append(f"{self.tied[0]} is tied to the embeddings: its second copy is left out.")
        self.scales = [key for key in base.scales if self.has_place(key)]
        if len(self.scales) < len(base.scales):
            left_out = sorted(set(base.scales) - set(self.scales))
            self.report.notices.append(
                f"{len(left_out)} scales for serving engines have no place here and are left out ({left_out[0]}, ...)."
            )
        linears = set(base.skeleton.all_linears)
        stacked = [fqn for fqn in base.weights if fqn not in linears]
        if stacked:
            self.report.notices.append(
                f"{len(stacked)} NVFP4 layers, the first {stacked[0]}, are no linears of their own in transformers "
                "(stacked experts): serving engines read them, load_model does not."
            )
        static = any(w.activation is not None and w.activation.scale is not None for w in self.planned.values())
        if target.name == "torchao" and static:
            self.report.notices.append("static activation scales: halfbyte reads them, transformers 5.24 does not.")
        if target.name == "compressed-tensors" and base.dtype != torch.bfloat16:
            self.report.notices.append(
                f"transformers decodes this format to bfloat16, and the model's config says {str(base.dtype)[6:]}: "
                "load it there with dtype=torch.bfloat16."
            )

    def has_place(self, key: str) -> bool:
        """True for a scale that the target's readers look for: of a kv cache, or as the base's own format had it."""
        if key.endswith(CACHE_SCALES):
            return self.target.name != "torchao"
        layer_is_fp8 = f"{key.rpartition('.')[0]}.weight" in {weight.key for weight in self.base.fp8.values()}
        return self.target.name == self.base.format.name and not layer_is_fp8

    def plan(self, fqn: str, weight: StoredWeight, activations: str) -> StoredWeight:
        """How the target keeps the weight."""
        activation: ActivationQuant | None = weight.activation if activations == "keep" else None
        return self.target.plan(weight.fqn, fqn, weight.shape, activation, self.base.dtype)

    def shared_scales(self, fuse: str) -> dict[str, Tensor]:
        """fqn -> the largest tensor scale of its fused group, where members differ. ValueError when that is refused."""
        shared: dict[str, Tensor] = {}
        for group in fused_groups(self.base.weights):
            scales = torch.stack([self.tensor_scale(fqn) for fqn in group])
            if (scales == scales[0]).all():
                continue
            if fuse == "refuse":
                pairs = zip(group, scales, strict=True)
                values = ", ".join(f"{fqn.rpartition('.')[2]} {float(scale):.6g}" for fqn, scale in pairs)
                raise ValueError(
                    f"{group[0]}: serving engines fuse it with its neighbours and take the largest tensor scale, but "
                    f"theirs differ ({values}). Use --fuse rescale, which also reports the error it adds."
                )
            shared |= dict.fromkeys(group, scales.max())
        return shared

    def tensor_scale(self, fqn: str) -> Tensor:
        return self.base.format.read_global_scale(self.base.shards, self.base.weights[fqn])

    @property
    def copied(self) -> list[str]:
        """Keys that are written as they are."""
        return [*self.dense.values(), *self.base.unknown, *self.scales]

    def specs(self) -> dict[str, TensorSpec]:
        shards = self.base.shards
        specs = {key: shards.spec(key) for key in self.copied}
        specs |= {w.key: TensorSpec(self.base.dtype, shards.spec(w.key).shape) for w in self.base.fp8.values()}
        for stored in self.planned.values():
            specs |= {key: stored.specs[component] for component, key in stored.keys.items()}
        return specs

    def write(self, folder: Path, max_shard_bytes: int, progress: Progress | None) -> None:
        shards = self.base.shards
        weights = {stored.fqn: stored for stored in self.planned.values()}
        names = [*self.dense, *self.base.unknown, *self.base.fp8, *(f"{fqn}.weight" for fqn in self.base.weights)]
        metadata = self.target.file_metadata(names, weights)
        todo, done = sum(weight.size_bytes for weight in self.base.weights.values()), 0
        with (
            ShardWriter(folder, self.specs(), metadata=metadata, max_shard_bytes=max_shard_bytes) as writer,
            ThreadPoolExecutor(1) as copier,
        ):
            for key in self.copied:
                writer.copy(key, shards, key)
            for weight in self.base.fp8.values():
                writer.write(weight.key, weight.read(shards, self.base.dtype))
            for fqn, stored in self.base.weights.items():
                # the kernel copies the codes while the scales are converted
                copied = copier.submit(writer.copy, self.planned[fqn].keys["qdata"], shards, stored.keys["qdata"])
                self.write_scales(writer, fqn)
                copied.result()
                done += stored.size_bytes
                if progress is not None:
                    progress(done, todo, fqn)
        if self.doubts:
            self.report.notices.append(plausible.summary(self.doubts))
        self.write_rest(folder, weights)

    def write_scales(self, writer: ShardWriter, fqn: str) -> None:
        """Block scales, tensor scale and activation scale of one weight, converted, or copied where nothing changes."""
        shards, weight, planned = self.base.shards, self.base.weights[fqn], self.planned[fqn]
        codes = torch.empty(planned.specs["qdata"].shape, dtype=torch.uint8, device="meta")  # copied, never read
        parts = NVFP4Parts(codes, self.base.format.read_scale(shards, weight), self.tensor_scale(fqn))
        doubt = plausible.implausible(parts.scale, parts.global_scale)
        if doubt:
            self.doubts[fqn] = doubt
        rescaled = fqn in self.shared and bool(parts.global_scale != self.shared[fqn])
        if rescaled:
            parts = rescale(parts, self.shared[fqn])
            self.report.rescaled[fqn] = self.added_error(weight, parts)
        tensors = self.target.encode(planned, parts)
        for component, key in planned.keys.items():
            as_stored = self.target.name == self.base.format.name and not rescaled and component in weight.keys
            if component == "qdata":
                continue
            if as_stored and component != "scale":
                writer.copy(key, shards, weight.keys[component])
            else:
                writer.write(key, tensors[key])
        if self.target.name in RECIPROCAL and self.base.format.name not in RECIPROCAL:
            back = 1 / (1 / parts.global_scale)
            if back != parts.global_scale:
                self.report.moved_scales[fqn] = float(back.double() / parts.global_scale.double() - 1)

    def added_error(self, weight: StoredWeight, rescaled: NVFP4Parts) -> float:
        """||W' - W|| / ||W|| of a weight whose scales were changed."""
        parts = self.base.format.read(self.base.shards, weight)
        return relative_error(dequantize(parts, torch.float32), rescaled._replace(qdata=parts.qdata))

    def write_rest(self, folder: Path, weights: dict[str, StoredWeight]) -> None:
        config = {key: value for key, value in self.base.config.items() if key != "compression_config"}
        linears = self.base.dense_linears
        if self.target.name == "torchao":  # transformers leaves the output layer out by itself
            linears = [fqn for fqn in linears if fqn != self.base.skeleton.output_embeddings]
        config = self.target.declare(config, weights, linears)
        extra = self.target.extra_files(config, linears)
        self.declare_cache(config, extra)
        write_json(folder / CONFIG_FILE, config)
        for name, content in extra.items():
            write_json(folder / name, content)
        copy_sidecars(self.base.folder, folder)
        record = {key: value for key, value in read_record(self.base.folder).items() if key != "halfbyte_version"}
        moved, rescaled = self.report.moved_scales, self.report.rescaled
        write_record(folder, **{**record, "exported_from": self.base.format.name, "moved": moved, "rescaled": rescaled})

    def declare_cache(self, config: dict[str, Any], extra: dict[str, Any]) -> None:
        """Say how the kv cache is quantized, as the base says it, or FP8 when it has scales for it and says nothing."""
        algorithm = cache_algorithm(self.base)
        if algorithm is None and any(key.endswith(CACHE_SCALES) for key in self.scales):
            algorithm = "FP8"
        if algorithm is None:
            return
        if self.target.name == "torchao" or (algorithm != "FP8" and QUANT_FILE not in extra):
            self.report.notices.append(f"the kv cache in {algorithm} cannot be said in this format.")
            return
        if algorithm == "FP8":
            config["quantization_config"]["kv_cache_scheme"] = FP8_CACHE
        if QUANT_FILE in extra:
            extra[QUANT_FILE]["quantization"]["kv_cache_quant_algo"] = algorithm


def cache_algorithm(base: Base) -> str | None:
    """How the base says that its kv cache is quantized, in ModelOpt's words ("FP8", "NVFP4")."""
    if (base.folder / QUANT_FILE).exists():
        quantization = read_json(base.folder / QUANT_FILE).get("quantization") or {}
        return quantization.get("kv_cache_quant_algo")
    scheme = (base.config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not isinstance(scheme, dict):
        return None
    return {8: "FP8", 4: "NVFP4"}.get(scheme.get("num_bits", 0), str(scheme.get("num_bits")) + " bits")


def rescale(parts: NVFP4Parts, global_scale: Tensor) -> NVFP4Parts:
    """The same codes under a larger tensor scale: block scales shrink, and are rounded to E4M3 once more."""
    scale = (parts.scale.float() * (parts.global_scale / global_scale)).to(torch.float8_e4m3fn)
    return NVFP4Parts(parts.qdata, scale, global_scale.clone())
