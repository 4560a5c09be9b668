"""Tensor parallelism for an NVFP4 base with LoRA: each layer's weight cut over the ranks of a mesh.

The plan is the model's own (transformers' `base_model_tp_plan`): q, k, v, gate, up by rows, o, down by columns;
embeddings, norms and lm_head stay whole. Packed components are cut as they are, by rows or by blocks of 16 columns;
nothing is decoded or quantized again. `parallelize_module` is rejected: its DTensors do not know packed bytes, and
PEFT's factors beside a cut layer get wrong gradients (tp_layers.py says what is right).
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.lora.names import base_name
from halfbyte.nvfp4.convert import replace_module
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel.agree import CHECK_TIMEOUT_S, together
from halfbyte.parallel.mesh import mesh_device
from halfbyte.parallel.synchronize import synchronize
from halfbyte.parallel.tp_layers import (
    ColumnLinear,
    ColumnNVFP4Linear,
    CutFactorA,
    CutFactorB,
    RowLinear,
    RowNVFP4Linear,
    WholeFactorA,
    cut_factors,
    rebuild,
)

COLUMN, ROW = "colwise", "rowwise"


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, timeout: float = CHECK_TIMEOUT_S) -> nn.Module:
    """Cut a model over a mesh, in place: a bare base, or a PeftModel with plain LoRA. Before the optimizer is made.

    model    on rank zero of the mesh with its weights; elsewhere with weights (overwritten) or on the meta device.
    mesh     one dimension; the ranks that share one copy of the model and see the same batches.
    raises   on every rank the same ValueError naming layer, found and expected, for what cannot be cut.
    """
    group = mesh.get_group()
    with together("Checking the tensor-parallel plan", group=group, timeout=timeout):
        plan = plan_of(model)
        check(model, plan, mesh.size())
    synchronize(model, group=group, timeout=timeout)
    for fqn, style in plan.items():
        cut_layer(model, fqn, style, mesh)
    return model


def plan_of(model: nn.Module) -> dict[str, str]:
    """fqn of each linear (or of PEFT's layer around it) -> "colwise" or "rowwise", from the model's own plan.

    raises  ValueError when the model has no plan, or one that asks for another style on a linear of a block.
    """
    config = getattr(model, "config", None)
    patterns: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not patterns:
        raise ValueError(f"{type(model).__name__} has no tensor-parallel plan in its config (base_model_tp_plan).")
    found = {}
    for fqn, module in model.named_modules():
        if not is_layer(fqn, module):
            continue
        for pattern, style in patterns.items():
            if re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", base_name(fqn)):
                if style not in (COLUMN, ROW):
                    raise ValueError(f"{fqn}: the plan says {style}, expected {COLUMN} or {ROW}")
                found[fqn] = style
    return found


def is_layer(fqn: str, module: nn.Module) -> bool:
    """PEFT's layer, or a linear that no such layer surrounds."""
    return hasattr(module, "base_layer") or (isinstance(module, nn.Linear) and ".base_layer" not in fqn)


def base_of(module: Any) -> Any:
    """The linear that PEFT's layer surrounds, or the module itself."""
    return getattr(module, "base_layer", module)


def check(model: nn.Module, plan: dict[str, str], degree: int) -> None:
    """ValueError for heads or columns that do not divide, and for adapters that this layout cannot hold."""
    config: Any = model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % degree:
            raise ValueError(f"{name} is {heads}, not divisible by the {degree} ranks of the mesh; use a divisor of it")
    if merge_aware_layers(model):
        raise ValueError("merge-aware LoRA under tensor parallelism is not supported; use plain LoRA, or DDP, FSDP2")
    for fqn, style in plan.items():
        module = model.get_submodule(fqn)
        check_layer(base_name(fqn), style, base_of(module), degree)
        check_adapter(base_name(fqn), module)


def check_layer(name: str, style: str, base: nn.Linear, degree: int) -> None:
    size = base.out_features if style == COLUMN else base.in_features
    if size % degree:
        raise ValueError(f"{name}: {size} features do not divide over {degree} ranks")
    if isinstance(base, NVFP4Linear) and style == ROW and size // degree % BLOCK_SIZE:
        raise ValueError(
            f"{name}: in_features {size} over {degree} ranks gives {size // degree} columns, expected a multiple of "
            f"{BLOCK_SIZE}: the number of ranks must divide {size // BLOCK_SIZE}"
        )


def check_adapter(name: str, module: nn.Module) -> None:
    if not hasattr(module, "lora_A"):
        return
    if getattr(module, "lora_variant", None):
        raise ValueError(f"{name}: DoRA and other LoRA variants cannot be cut; use plain LoRA")
    if any(getattr(module, "lora_bias", {}).values()):
        raise ValueError(f"{name}: a bias in the adapter would be added by every rank; use lora_bias=False")


def cut_layer(model: nn.Module, fqn: str, style: str, mesh: DeviceMesh) -> None:
    """Replace a linear, and the LoRA factors beside it, by this rank's parts."""
    module: Any = model.get_submodule(fqn)
    new = cut_base(base_of(module), style, mesh, fqn)
    if not hasattr(module, "base_layer"):
        replace_module(model, fqn, new)
        return
    module.base_layer = new
    group, factors_a, factors_b = mesh.get_group(), module.lora_A, module.lora_B
    for adapter in list(factors_a):
        a, b = factors_a[adapter], factors_b[adapter]
        if style == COLUMN:
            factors_a[adapter] = rebuild(WholeFactorA, a, a.weight, None, group)
            factors_b[adapter] = rebuild(CutFactorB, b, part(b.weight, 0, mesh), None, group)
        else:
            factors_a[adapter] = rebuild(CutFactorA, a, part(a.weight, 1, mesh), None, group)


def cut_base(base: nn.Linear, style: str, mesh: DeviceMesh, name: str) -> nn.Module:
    """This rank's part of a frozen linear."""
    dim = 0 if style == COLUMN else 1
    bias = base.bias if base.bias is None or style == ROW else part(base.bias, 0, mesh)
    if not isinstance(base, NVFP4Linear):
        dense = ColumnLinear if style == COLUMN else RowLinear
        return rebuild(dense, base, part(base.weight, dim, mesh), bias, mesh.get_group())
    whole = base.parts()
    parts = NVFP4Parts(part(whole.qdata, dim, mesh), part(whole.scale, dim, mesh), whole.global_scale)
    packed = ColumnNVFP4Linear if style == COLUMN else RowNVFP4Linear
    new: Any = packed.from_parts(parts, bias, dtype=base.dtype, activation=base.activation, name=name)
    new.group = mesh.get_group()
    return new.train(base.training)


def part(tensor: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    """This rank's equal share of a tensor along a dimension; a copy."""
    raw = tensor.detach()
    if raw.dtype == torch.float8_e4m3fn:
        return part(raw.view(torch.uint8), dim, mesh).view(torch.float8_e4m3fn)
    return raw.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Scale gradients to a global norm of at most max_norm, whole parameters counted once; returns the norm."""
    cut = cut_factors(model)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    parts = get_total_norm([grad for name, grad in grads.items() if name in cut])
    wholes = get_total_norm([grad for name, grad in grads.items() if name not in cut])
    square = parts.float().square().to(mesh_device(mesh))
    dist.all_reduce(square, group=mesh.get_group())
    norm = (square + wholes.float().square().to(square.device)).sqrt()
    if max_norm < float("inf"):
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
