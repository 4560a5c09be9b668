"""`load_model` for one rank of a tensor-parallel mesh: it reads its part of each layer, and nothing of the others'.

The plan and everything that could be refused is looked at on the meta device first. Then the layers of the plan stand
in the empty model with this rank's shapes, and are filled from a folder that seems to hold just these parts.
"""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from halfbyte.checkpoint import plausible
from halfbyte.checkpoint.contents import Contents, Fp8Weight, read_contents
from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.formats.base import StoredWeight
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.load import (
    LazyTensor,
    as_dtype,
    finish,
    lazy,
    load_dense,
    load_model,
    match_layers,
    read_layer,
)
from halfbyte.checkpoint.part_shards import Cut, PartShards
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.checkpoint.tensor_file import DTYPE_NAMES
from halfbyte.nvfp4.convert import replace_module
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.parallel.tensor_parallel import empty_part, packed_layer, part
from halfbyte.parallel.tp_plan import ROW, Plan, check, plan_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_part(
    path: str | os.PathLike[str],
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> "PreTrainedModel":
    """The model in an NVFP4 checkpoint, cut over a mesh of one dimension; each rank calls it for itself.

    Attach an adapter as to any base, and call `tensor_parallel(model, mesh, plan=plan)` on all ranks.

    plan     other than the model's own, as for `tensor_parallel`.
    dtype, device   as for `load_model`.
    raises   as `load_model`; before any weight is read, ValueError naming layer, found and expected, for what cannot be
             cut.
    """
    whole: Any = load_model(path, dtype=dtype, device="meta")
    layers = plan_of(whole, plan)
    check(whole, layers, mesh.size())
    folder = local_folder(path)
    config = read_config(folder)
    format = detect(folder, config)
    assert format is not None, folder
    suspicious: dict[str, str] = {}
    with Shards(folder) as files:
        skeleton = Skeleton.from_folder(folder, dtype=as_dtype(dtype))
        contents = read_contents(files, format, config, lambda key: skeleton.target(key).name, skeleton.can_do_without)
        packed = match_layers(skeleton, files, contents.weights)
        for fqn, style in layers.items():
            replace_module(skeleton.model, fqn, empty_part(skeleton.model.get_submodule(fqn), style, mesh))
        cuts = cuts_of(skeleton, contents, packed, layers)
        shards = PartShards(files, cuts, mesh.get_local_rank(), mesh.size())
        dense = {key: lazy(shards, key, device, suspicious) for key in contents.dense}
        for key, weight in contents.fp8.items():
            name = skeleton.target(key).name.removesuffix(".weight")
            dense[key] = lazy_fp8(files, weight, layers.get(name), mesh)
        load_dense(skeleton, shards, dense, set(packed), device)
        for fqn, stored in packed.items():
            if fqn not in layers:
                layer: Any = read_layer(format, shards, stored, skeleton, fqn, device, suspicious)
            else:
                parts = format.read(shards, held(stored, layers[fqn], mesh.size()))
                doubt = plausible.implausible(parts.scale, parts.global_scale)
                suspicious |= {fqn: doubt} if doubt else {}
                parts = type(parts)(*(component.to(device) for component in parts))
                bias: Any = skeleton.model.get_submodule(fqn).bias
                layer = packed_layer(whole.get_submodule(fqn), parts, bias, layers[fqn], mesh, fqn)
            replace_module(skeleton.model, fqn, layer)
    if suspicious:
        warnings.warn(f"{folder}: {plausible.summary(suspicious)}", stacklevel=2)
    return finish(skeleton, folder, device)


def cuts_of(skeleton: Skeleton, contents: Contents, packed: Mapping[str, StoredWeight], layers: Plan) -> dict[str, Cut]:
    """How each key of a layer in the plan is cut."""
    cuts = {}
    for key in contents.dense:
        target = skeleton.target(key)
        fqn, _, leaf = target.name.rpartition(".")
        if fqn in layers and not target.fused and (leaf == "weight" or layers[fqn] != ROW):
            cuts[key] = Cut(1 if layers[fqn] == ROW else 0)
    for fqn, stored in packed.items():
        if fqn in layers:
            dim, (rows, columns) = int(layers[fqn] == ROW), stored.shape
            grid = (rows, columns // BLOCK_SIZE) if stored.details.get("is_swizzled_scales") else None
            cuts |= {stored.keys["qdata"]: Cut(dim), stored.keys["scale"]: Cut(dim, grid)}
    return cuts


def held(stored: StoredWeight, style: str, count: int) -> StoredWeight:
    """A rank's part of a weight, as a folder would hold it."""
    rows, columns = stored.shape
    return dataclasses.replace(stored, shape=(rows, columns // count) if style == ROW else (rows // count, columns))


def lazy_fp8(files: Shards, weight: Fp8Weight, style: str | None, mesh: DeviceMesh) -> LazyTensor:
    """The dense form of an FP8 weight, or this rank's part of it, for which the whole is read."""
    rows, columns = files.spec(weight.key).shape
    if style is not None:
        rows, columns = (rows, columns // mesh.size()) if style == ROW else (rows // mesh.size(), columns)

    def read() -> torch.Tensor:
        dense = weight.read(files, torch.float32)
        return dense if style is None else part(dense, int(style == ROW), mesh)

    return LazyTensor(read, DTYPE_NAMES[torch.float32], (rows, columns))
