"""The streaming part of a merge: every output tensor planned from the headers, then computed and written one by one.

Back to NVFP4 it writes the base's own keys, layout and metadata; only codes change (and block scales, where asked for),
and whatever the adapter does not touch is copied byte for byte. To a dense dtype it decodes, adds and rounds once.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint import plausible
from halfbyte.checkpoint.adapter import Adapter, Factors
from halfbyte.checkpoint.base import Base
from halfbyte.checkpoint.contents import Fp8Weight
from halfbyte.checkpoint.detect import CONFIG_FILE, read_json
from halfbyte.checkpoint.digest import streamed_digest
from halfbyte.checkpoint.finite import check_finite, check_stored
from halfbyte.checkpoint.formats.base import StoredWeight
from halfbyte.checkpoint.formats.modelopt import QUANT_FILE
from halfbyte.checkpoint.fused import fused_groups
from halfbyte.checkpoint.merge_layer import add_delta, as_linear, bits, check_original, check_shape
from halfbyte.checkpoint.merge_match import check_fp8, check_targets, layer_of, untied_outputs
from halfbyte.checkpoint.merge_report import MergedLayer, MergeReport, Settings
from halfbyte.checkpoint.quantize import Progress
from halfbyte.checkpoint.shard_writer import ShardWriter
from halfbyte.checkpoint.sidecar import copy_sidecars, read_record, write_json, write_record
from halfbyte.checkpoint.source import DenseSource
from halfbyte.checkpoint.tensor_file import TensorSpec
from halfbyte.lora import metadata as lora_metadata
from halfbyte.lora.merge import check_factors, merged_parts
from halfbyte.lora.retention import Retention, retention
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.digest import model_digest
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.quantize import largest_magnitude, quantize
from halfbyte.nvfp4.scaling import global_scale_for

DENSE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Merger:
    """One merge: knows every output tensor before the first is computed, then writes them one by one."""

    def __init__(
        self,
        base: Base,
        adapter: Adapter,
        settings: Settings,
        recorded: lora_metadata.AdapterMetadata | None,
        onto: dict[str, tuple[DenseSource, str]] | None,
        any_base: bool,
    ):
        self.base, self.adapter, self.settings = base, adapter, settings
        self.recorded, self.onto, self.any_base = recorded, onto, any_base
        self.report = MergeReport(settings)
        self.doubts: dict[str, str] = {}  # fqn -> what is suspicious about its scales
        self.digests: dict[str, tuple[tuple[int, int], int]] = {}  # of merged weights, if the adapter recorded them
        self.as_trained = trained_for(recorded, settings, onto is not None)  # so the recorded digest must come out
        self.recipe = str(read_record(base.folder).get("scales", "max"))
        merge_aware = recorded is not None and recorded.mode == "merge-aware"
        self.nearest_dtype = getattr(torch, recorded.quantizer.dtype) if recorded and merge_aware else base.dtype
        self.untied = untied_outputs(base, adapter)
        if recorded is not None and self.as_trained and (changed := lora_metadata.other_quantizer(recorded)):
            if not any_base:
                lora_metadata.check_version(recorded)
            self.as_trained = False
            self.report.warnings.append(f"any_base: {changed}.")
        check_targets(base, adapter)
        check_fp8(base, adapter, settings.to)

    # ---- what is written

    def specs(self) -> dict[str, TensorSpec]:
        """Output key -> dtype and shape."""
        base, asked = self.base, DENSE_DTYPES.get(self.settings.to)
        specs: dict[str, TensorSpec] = {}
        if asked is None:
            specs |= {key: base.shards.spec(key) for key in base.shards}
        else:
            specs |= {w.key: TensorSpec(asked, base.shards.spec(w.key).shape) for w in base.fp8.values()}
            specs |= {weight.weight_name: TensorSpec(asked, weight.shape) for weight in base.weights.values()}
            specs |= {key: base.shards.spec(key) for key in base.unknown}
        for name, key in [*base.dense.items(), *((copy, base.dense[name]) for copy, name in self.untied.items())]:
            specs[name if name in self.untied else key] = TensorSpec(
                self.dense_dtype(name, key), base.shards.spec(key).shape
            )
        return specs

    def dense_dtype(self, name: str, key: str) -> torch.dtype:
        """Of a parameter that is dense in the base: its own, or if it changes, a wider one that was asked for."""
        own, asked = self.base.shards.spec(key).dtype, DENSE_DTYPES.get(self.settings.to)
        return torch.promote_types(own, asked) if self.changes(name) and asked is not None else own

    def changes(self, name: str) -> bool:
        """True when the adapter has a change, or a new value, for this parameter."""
        return name in self.adapter.modules or layer_of(name) in self.adapter.layers

    def metadata(self) -> dict[str, str]:
        """Of the files: the base's own where its weights stay as they are, plus outputs that are tied no more."""
        if self.settings.to != "nvfp4":
            return {}
        if not self.untied:
            return dict(self.base.shards.metadata)
        names = [*self.base.dense, *(f"{fqn}.weight" for fqn in self.base.weights), *self.untied]
        stored = {weight.fqn: weight for weight in self.base.weights.values()}
        return self.base.format.file_metadata(names, stored)

    def write(self, folder: Path, max_shard_bytes: int, progress: Progress | None) -> None:
        specs = self.specs()
        todo = sum(weight.size_bytes for weight in self.base.weights.values())
        done = 0
        with ShardWriter(folder, specs, metadata=self.metadata(), max_shard_bytes=max_shard_bytes) as writer:
            for name, key in self.base.dense.items():
                if self.changes(name):
                    writer.write(key, self.dense_parameter(name, key))
                else:
                    check_stored(self.base.shards, key)
                    writer.copy(key, self.base.shards, key)
            for copy, original in self.untied.items():
                writer.write(copy, self.dense_parameter(copy, self.base.dense[original]))
            for name, weight in self.base.fp8.items():
                writer.write(weight.key, self.fp8_parameter(name, weight))
            for key in self.base.kept if self.settings.to == "nvfp4" else self.base.unknown:
                writer.copy(key, self.base.shards, key)
            for group in fused_groups(self.base.weights):
                for tensors in self.merged_group(group):
                    for key, tensor in tensors.items():
                        writer.write(key, tensor)
                done += sum(self.base.weights[fqn].size_bytes for fqn in group)
                if progress is not None:
                    progress(done, todo, group[0])
        self.check_merged_digest()
        if self.settings.rounding == "nearest" and self.settings.to == "nvfp4" and self.onto is None:
            self.report.warnings.append(
                f"rounding to nearest kept {self.report.retained.kept:.1%} of the adapter's change; dither keeps "
                "nearly all of an ordinary adapter's."
            )
        if self.doubts:
            self.report.warnings.append(plausible.summary(self.doubts))
        self.write_rest(folder)

    def write_rest(self, folder: Path) -> None:
        config = dict(self.base.config)
        if self.settings.to != "nvfp4":
            config.pop("quantization_config", None)
            config.pop("compression_config", None)
            config["dtype"] = str(DENSE_DTYPES[self.settings.to]).removeprefix("torch.")
        elif (self.base.folder / QUANT_FILE).exists():
            write_json(folder / QUANT_FILE, read_json(self.base.folder / QUANT_FILE))
        if self.untied:
            config["tie_word_embeddings"] = False
        write_json(folder / CONFIG_FILE, config)
        copy_sidecars(self.base.folder, folder)
        write_record(
            folder,
            made_by="merge",
            to=self.settings.to,
            rounding=self.settings.rounding,
            block_scales=self.settings.scales,
            seed=self.settings.seed,
            quantizer_version=lora_metadata.QUANTIZER_VERSION,
            onto_dense=self.onto is not None,
            scales=self.recipe,
            retained=self.report.retained.kept,
            layers={layer.name: layer.figures() for layer in self.report.layers},
            base_digest=self.recorded.base_digest if self.recorded else None,
            warnings=self.report.warnings,
        )

    # ---- one parameter or layer

    def dense_parameter(self, name: str, key: str) -> Tensor:
        """A parameter that is dense in the base: replaced, merged, or as it was."""
        value, dtype = self.base.shards.read(key), self.dense_dtype(name, key)
        check_finite(value, key, self.base.shards.path_of(key))
        if name in self.adapter.modules:
            new = self.adapter.module(name)
            if new.shape != value.shape:
                raise ValueError(
                    f"{self.adapter.folder}: {name} is {list(new.shape)}, the base has {list(value.shape)}. Use the "
                    "base it was trained on."
                )
            check_finite(new, name, self.adapter.folder)
            self.report.replaced.append(name)
            value = new.to(dtype)
        layer = name.removesuffix(".weight")
        if layer in self.adapter.layers:
            factors = as_linear(self.adapter.factors(layer))
            check_shape(value, factors, layer)
            value, kept = add_delta(value, factors, dtype)
            self.report.layers.append(MergedLayer(layer, "dense", kept))
        return value.to(dtype)

    def fp8_parameter(self, name: str, weight: Fp8Weight) -> Tensor:
        """An FP8 weight: as it is beside NVFP4, decoded (and merged) for a dense output."""
        check_stored(self.base.shards, weight.key)
        if self.settings.to == "nvfp4":
            return self.base.shards.read(weight.key)
        dtype, layer = DENSE_DTYPES[self.settings.to], layer_of(name)
        if layer not in self.adapter.layers:
            return weight.read(self.base.shards, dtype)
        factors, value = self.adapter.factors(layer), weight.read(self.base.shards, torch.float32)
        check_shape(value, factors, layer)
        value, kept = add_delta(value, factors, dtype)
        self.keep_line(layer, self.settings.to, kept)
        return value

    def merged_group(self, group: list[str]) -> Iterator[dict[str, Tensor]]:
        """Key -> tensor of each of the layers that are fused in serving; only --onto looks at them together."""
        amax = None
        if self.onto is not None and self.settings.to == "nvfp4":
            amax = torch.stack([largest_magnitude(self.merged_original(fqn)[0], fqn) for fqn in group]).max()
        for fqn in group:
            yield self.merged_layer(fqn, amax)

    def merged_layer(self, fqn: str, amax: Tensor | None) -> dict[str, Tensor]:
        weight = self.base.weights[fqn]
        factors = self.adapter.factors(fqn) if fqn in self.adapter.layers else None
        if factors is None and self.settings.to == "nvfp4" and self.onto is None:
            return {key: self.base.shards.read(key) for key in weight.keys.values()}
        parts = self.base.format.read(self.base.shards, weight)
        doubt = plausible.implausible(parts.scale, parts.global_scale)
        if doubt:
            self.doubts[fqn] = doubt
        if factors is not None:
            self.check_digest(fqn, parts)
            check_factors(parts, factors.lora_A, factors.lora_B, fqn)
        if self.settings.to != "nvfp4":
            return {weight.weight_name: self.to_dense(fqn, parts, factors)}
        if self.onto is not None:
            assert amax is not None
            return self.base.format.encode(weight, self.requantized(fqn, parts, amax, factors))
        assert factors is not None
        return self.rounded(fqn, weight, parts, factors)

    def rounded(self, fqn: str, weight: StoredWeight, parts: NVFP4Parts, factors: Factors) -> dict[str, Tensor]:
        """Base plus delta in NVFP4; components that did not change are the file's own bytes, padding included."""
        merged = merged_parts(
            parts,
            factors.lora_A,
            factors.lora_B,
            factors.scaling,
            name=fqn,
            seed=self.settings.seed,
            rounding=self.settings.rounding,  # type: ignore[arg-type]
            scales=self.settings.scales,  # type: ignore[arg-type]
            dtype=self.nearest_dtype,
        )
        self.keep_line(fqn, "nvfp4", retention(parts, merged, factors.lora_A, factors.lora_B, factors.scaling))
        if self.recorded is not None and self.recorded.merged_digest is not None:
            self.digests[fqn] = (merged.shape, streamed_digest(merged))
        tensors = self.base.format.encode(weight, merged)
        same = {"global_scale", "act_scale"} | (
            {"scale"} if torch.equal(bits(merged.scale), bits(parts.scale)) else set()
        )
        return tensors | {key: self.base.shards.read(key) for c, key in weight.keys.items() if c in same}

    def to_dense(self, fqn: str, parts: NVFP4Parts, factors: Factors | None) -> Tensor:
        """Decoded, or the dense original, with the delta added in fp32 and rounded once."""
        dtype = DENSE_DTYPES[self.settings.to]
        if self.onto is not None:
            value, kept = self.merged_original(fqn, dtype)
        elif factors is None:
            return dequantize(parts, dtype)
        else:
            value, kept = add_delta(dequantize(parts, torch.float32), factors, dtype)
        if factors is not None:
            self.keep_line(fqn, self.settings.to, kept)
        return value

    def merged_original(self, fqn: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Retention]:
        """The dense original plus the adapter's delta, if any."""
        assert self.onto is not None
        source, key = self.onto[fqn]
        original = source.read(key)
        if fqn not in self.adapter.layers:
            return original.to(dtype), Retention()
        return add_delta(original.float(), self.adapter.factors(fqn), dtype)

    def requantized(self, fqn: str, parts: NVFP4Parts, amax: Tensor, factors: Factors | None) -> NVFP4Parts:
        """The merged original, quantized as the base was. Kept is measured against the original quantized likewise."""
        assert self.onto is not None
        source, key = self.onto[fqn]
        original = source.read(key).float()
        check_original(fqn, original, parts, source.path)
        has_scale = "global_scale" in self.base.weights[fqn].keys
        global_scale = global_scale_for(amax, scales=self.recipe) if has_scale else torch.ones(())
        merged = quantize(self.merged_original(fqn)[0], global_scale=global_scale, name=fqn, scales=self.recipe)
        if factors is not None:
            unmerged = quantize(original, global_scale=global_scale, name=fqn, scales=self.recipe)
            kept = retention(unmerged, merged, factors.lora_A, factors.lora_B, factors.scaling)
            self.keep_line(fqn, "nvfp4", kept)
        return merged

    def check_merged_digest(self) -> None:
        """ValueError when the adapter recorded the digest of the weights it was trained for, and others came out.

        Under other settings, or on another base, others must come out, and nothing can be checked.
        """
        if self.recorded is None or self.recorded.merged_digest is None or not self.as_trained:
            return
        digest = model_digest(self.digests)
        if digest != self.recorded.merged_digest:
            raise ValueError(
                f"{self.adapter.folder}: the merged weights have digest {digest[:16]}, the adapter was trained for "
                f"{self.recorded.merged_digest[:16]}. The adapter's weights are not those of its record; copy its "
                "whole folder again."
            )

    def keep_line(self, fqn: str, kind: str, kept: Retention) -> None:
        self.report.layers.append(MergedLayer(fqn, kind, kept))

    def check_digest(self, fqn: str, parts: NVFP4Parts) -> None:
        """ValueError, or a warning if so wanted, when the adapter was trained on other codes."""
        target = self.recorded.targets.get(fqn) if self.recorded is not None else None
        if target is None or target.digest == f"{streamed_digest(parts):016x}":
            return
        message = f"{fqn}: this is not the base that the adapter was trained on (its codes or scales differ)."
        if not self.any_base:
            raise ValueError(f"{message} Use that base, or --any-base to merge all the same.")
        self.as_trained = False
        self.report.warnings.append(message)


def trained_for(recorded: lora_metadata.AdapterMetadata | None, settings: Settings, onto: bool) -> bool:
    """Whether a merge rounds as the adapter was trained merge-aware for; not onto another model's weights."""
    if recorded is None or recorded.mode != "merge-aware" or settings.to != "nvfp4" or onto:
        return False
    own = recorded.quantizer
    return (own.rounding, own.scales, own.seed) == (settings.rounding, settings.scales, settings.seed)
