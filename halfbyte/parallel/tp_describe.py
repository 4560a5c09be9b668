"""The metadata of an adapter on a base that is cut over a mesh, equal to that of an unsharded run.

Nothing is gathered: the digest of a weight is the sum of its parts' digests, of base and merged weight alike.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from halfbyte.lora import metadata
from halfbyte.lora.merge_aware import merge_aware_layers, quantizer_of
from halfbyte.lora.names import base_name
from halfbyte.numerics.hashing import MASK
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import global_scale_digest, model_digest, shard_digest
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel.agree import agree
from halfbyte.parallel.tp_layers import Packed, offsets

TIMEOUT_S = 600.0


@torch.no_grad()
def describe_cut(model: nn.Module, *, start_step: int = 0) -> metadata.AdapterMetadata:
    """`halfbyte.lora.adapter_files.describe_adapter` of a tensor-parallel model. Call it on all ranks; all get it."""
    layers = {base_name(fqn): m for fqn, m in nvfp4_modules(model).items() if fqn.endswith(".base_layer")}
    merge_aware = merge_aware_layers(model)
    base = whole_digests({name: (layer, layer.parts()) for name, layer in layers.items()})
    targets = {
        name: metadata.Target(shape_of(layer), f"{base[name]:016x}", metadata.activation_text(layer.activation))
        for name, layer in sorted(layers.items())
    }
    described = metadata.AdapterMetadata(targets=targets, versions=metadata.versions())
    if not merge_aware:
        return described
    active = {name: layer for name, layer in merge_aware.items() if layer.merge_aware_adapter() is not None}
    merged = whole_digests({name: (layer.frozen(), layer.merged_weight()) for name, layer in active.items()})
    return dataclasses.replace(
        described,
        mode="merge-aware",
        quantizer=quantizer_of(model),
        start_step=start_step,
        merged_digest=model_digest({name: (shape_of(layers[name]), digest) for name, digest in merged.items()}),
    )


def shape_of(layer: NVFP4Linear) -> tuple[int, int]:
    """Of the whole weight."""
    return layer.out_features, layer.in_features


def whole_digests(weights: dict[str, tuple[NVFP4Linear, NVFP4Parts]]) -> dict[str, int]:
    """The digest of each whole weight, from the layers and this rank's parts of it (the base's, or merged ones)."""
    mine = {name: part_digest(layer, parts) for name, (layer, parts) in weights.items()}
    group: Any = next((layer.group for layer, _ in weights.values() if isinstance(layer, Packed)), None)
    everyone = agree("Digesting the weights", mine, group=group, timeout=TIMEOUT_S) if group else [mine]
    found = {}
    for name, (layer, parts) in weights.items():
        codes = sum(each[name] for each in everyone) if isinstance(layer, Packed) else mine[name]
        found[name] = (codes + global_scale_digest(parts)) & MASK
    return found


def part_digest(layer: NVFP4Linear, parts: NVFP4Parts) -> int:
    row, column = offsets(layer)
    return shard_digest(parts, row_offset=row, column_offset=column, in_features=layer.in_features)
