"""An adapter from an engine that shards it: whole, checked, and described as in an unsharded run.

Under ZeRO-3 a parameter that is not gathered looks like an empty tensor, and under FSDP2 like a DTensor; written as
they are, they give an adapter file that loads without complaint and holds nothing. So: gather, compare shapes with
the layers, refuse otherwise.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from halfbyte.lora import metadata
from halfbyte.lora.adapter_files import write_adapter
from halfbyte.lora.merge import merge
from halfbyte.lora.merge_aware import merge_aware_layers, quantizer_of
from halfbyte.lora.names import base_name
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import model_digest, weight_digest
from halfbyte.nvfp4.format import NVFP4Parts, bytes_to_float
from halfbyte.nvfp4.linear import COMPONENTS, NVFP4Linear
from halfbyte.parallel.agree import together
from halfbyte.parallel.tp_describe import describe_cut
from halfbyte.parallel.tp_layers import cut_factors, cut_tensors, gathered

SAVE_TIMEOUT_S = 600.0


@torch.no_grad()
def gather_trainable(model: nn.Module) -> dict[str, Tensor]:
    """Every trainable parameter, whole, on the CPU, by name. Call it on all ranks; all get it.

    model   plain, under DDP, sharded by FSDP2, partitioned by ZeRO-3 (the engine's module), or tensor-parallel.
    raises  RuntimeError naming the layer when an adapter factor does not have the shape its layer asks for, or when
            tensor-parallel ranks differ in one that each of them holds whole.
    """
    reshard(model)
    cut = cut_factors(model)
    mesh_group = next((group for _, group in cut.values()), None)
    whole = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in cut:
            tensor = gathered(parameter, *cut[name])
        else:
            tensor = _whole(parameter)
            if mesh_group is not None:
                _check_replicas(name, tensor, mesh_group)
        whole[name.removeprefix("module.")] = tensor.cpu()
    check_factors(model, whole)
    return whole


def save_adapter(model: Any, folder: str | Path, *, start_step: int = 0) -> None:
    """`halfbyte.lora.save_adapter` under any engine: gathered, written by rank zero; all agree or all raise.

    model       the PeftModel inside the engine (`engine.module` for DDP and DeepSpeed).
    start_step  the optimizer step from which on training was merge-aware.
    """
    with together(f"Saving the adapter to {folder}", timeout=SAVE_TIMEOUT_S):
        whole = gather_trainable(model)
        described = describe_adapter(model, start_step=start_step)
        if described is not None:
            write_adapter(model, folder, described, state_dict=whole)


@torch.no_grad()
def describe_adapter(model: nn.Module, *, start_step: int = 0) -> metadata.AdapterMetadata | None:
    """`halfbyte.lora.adapter_files.describe_adapter` of a model whose base may be sharded; on rank zero, else None.

    Call it on all ranks. One layer is gathered at a time; of one that is cut over a mesh, only digests are.
    """
    reshard(model)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if cut_tensors(model):
        described = describe_cut(model, start_step=start_step)
        return described if writes else None
    merge_aware = merge_aware_layers(model)
    targets, merged = {}, {}
    for fqn, layer in nvfp4_modules(model).items():
        if not fqn.endswith(".base_layer"):
            continue
        name, parts = base_name(fqn), whole_parts(layer)
        factors = whole_factors(merge_aware[name]) if name in merge_aware else None
        if writes:
            whole = NVFP4Linear.from_parts(parts, dtype=layer.dtype, activation=layer.activation)
            targets[name] = metadata.target_of(whole)
            if factors is not None:
                new = merge(parts, *factors, merge_aware[name].recipe)
                merged[name] = (new.shape, weight_digest(new))
    if not writes:
        return None
    described = metadata.AdapterMetadata(targets=dict(sorted(targets.items())), versions=metadata.versions())
    if not merge_aware:
        return described
    return dataclasses.replace(
        described,
        mode="merge-aware",
        quantizer=quantizer_of(model),
        start_step=start_step,
        merged_digest=model_digest(merged),
    )


def whole_parts(layer: NVFP4Linear) -> NVFP4Parts:
    """The components of a layer, gathered where an engine shards them; call it on all ranks."""
    qdata, scale, global_scale = (_whole(getattr(layer, name)) for name in COMPONENTS)
    return NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), bytes_to_float(global_scale))


def whole_factors(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """(lora_A, lora_B, scaling) of a merge-aware layer's active adapter, gathered; None where none is active."""
    adapter = layer.merge_aware_adapter()
    if adapter is None:
        return None
    lora_A, lora_B = (_whole(factors[adapter].weight) for factors in (layer.lora_A, layer.lora_B))
    if layer.merged_from not in (None, lora_A.dtype):
        raise ValueError(
            f"{layer.recipe.name}: the merged weight was trained from factors cast to {layer.merged_from}, but they "
            f"are saved in {lora_A.dtype}, which merges to another weight. Shard with halfbyte.parallel.fsdp2, which "
            "keeps them, or use a mixed-precision policy without param_dtype."
        )
    return lora_A, lora_B, layer.scaling[adapter]


def reshard(model: nn.Module) -> None:
    """Let go of what FSDP2 has gathered: after a forward alone, it may hold parameters whole, in a policy's dtype."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check_factors(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """RuntimeError unless each lora_A is [r, in] and each lora_B [out, r] of its layer, and nothing is empty."""
    for fqn, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        fqn, base = fqn.removeprefix("module."), module.base_layer
        for adapter, r in getattr(module, "r", {}).items():
            for factor, shape in (("lora_A", (r, base.in_features)), ("lora_B", (base.out_features, r))):
                found = whole.get(f"{fqn}.{factor}.{adapter}.weight")
                if found is not None and tuple(found.shape) != shape:
                    raise RuntimeError(
                        f"{fqn}.{factor}: gathered as {list(found.shape)}, expected {list(shape)}; nothing was "
                        "written. Save from the engine's own module (engine.module), on all ranks at once."
                    )
    empty = [name for name, tensor in whole.items() if tensor.numel() == 0]
    if empty:
        raise RuntimeError(
            f"{empty[0]} was gathered as an empty tensor; nothing was written. Save from the engine's own module "
            "(engine.module), on all ranks at once."
        )


def _check_replicas(name: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    if not torch.equal(gathered(tensor[None], 0, group), tensor.expand(dist.get_world_size(group), *tensor.shape)):
        raise RuntimeError(
            f"{name} is held whole by all ranks, but they differ: did they see different batches? Give the ranks of a "
            "group the same ones, from the first step on."
        )


def _whole(parameter: Any) -> Tensor:
    if hasattr(parameter, "full_tensor"):  # a DTensor; offloaded shards are gathered on the mesh's devices
        return parameter.detach().to(parameter.device_mesh.device_type).full_tensor().clone()
    if hasattr(parameter, "ds_id"):  # partitioned by ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach().clone()
