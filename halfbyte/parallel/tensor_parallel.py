"""Tensor parallelism for an NVFP4 base with LoRA: each layer's weight cut over the ranks of a mesh.

Packed components are cut as they are, by rows or by blocks of 16 columns; nothing is decoded or quantized again.
`parallelize_module` is rejected: its DTensors do not know packed bytes, and PEFT's factors beside a cut layer get wrong
gradients (tp_layers.py says what is right). tp_plan.py says which layers are cut, and what is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from halfbyte.nvfp4.convert import replace_module
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel.agree import CHECK_TIMEOUT_S, together
from halfbyte.parallel.mesh import mesh_device
from halfbyte.parallel.synchronize import synchronize
from halfbyte.parallel.tp_layers import (
    Column,
    ColumnLinear,
    ColumnNVFP4Linear,
    CutDropout,
    CutFactorA,
    CutFactorB,
    GatheredColumnLinear,
    Row,
    RowLinear,
    RowNVFP4Linear,
    WholeFactorA,
    WholeFactorB,
    cut_factors,
    cut_tensors,
    rebuild,
)
from halfbyte.parallel.tp_plan import COLUMN, GATHERED, ROW, base_of, check, plan_of

PACKED: dict[str, type[NVFP4Linear]] = {COLUMN: ColumnNVFP4Linear, ROW: RowNVFP4Linear}
DENSE: dict[str, type[nn.Linear]] = {COLUMN: ColumnLinear, ROW: RowLinear, GATHERED: GatheredColumnLinear}


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Mapping[str, str] | None = None,
    timeout: float = CHECK_TIMEOUT_S,
) -> nn.Module:
    """Cut a model over a mesh, in place: a bare base, or a PeftModel with LoRA, plain or merge-aware.

    Before the optimizer is made. Parts that are cut already stay as they are: after adding an adapter, call it again.

    model    on rank zero of the mesh with its weights; elsewhere with weights (overwritten) or on the meta device. Or
             with a base from `halfbyte.checkpoint.load_part`, of which each rank has read its part.
    mesh     one dimension; the ranks that share one copy of the model and see the same batches.
    plan     other than the model's own: names with * for numbers -> colwise, rowwise or colwise_gather_output.
    raises   on every rank the same ValueError naming layer, found and expected, for what cannot be cut.
    """
    group = mesh.get_group()
    with together("Checking the tensor-parallel plan", group=group, timeout=timeout):
        layers = plan_of(model, plan)
        check(model, layers, mesh.size())
    synchronize(model, group=group, timeout=timeout, apart=cut_tensors(model))
    for fqn, style in layers.items():
        cut_layer(model, fqn, style, mesh)
    return model


def cut_layer(model: nn.Module, fqn: str, style: str, mesh: DeviceMesh) -> None:
    """Replace a linear, and the LoRA factors beside it, by this rank's parts."""
    module: Any = model.get_submodule(fqn)
    base = base_of(module)
    if not isinstance(base, Column + Row):
        base = cut_base(base, style, mesh, fqn)
    if not hasattr(module, "base_layer"):
        replace_module(model, fqn, base)
        return
    from halfbyte.parallel.tp_lora import cut_lora_layer

    module.base_layer = base
    for adapter in module.lora_A:
        cut_adapter(module, adapter, style, mesh)
    if not hasattr(module, "group"):
        replace_module(model, fqn, cut_lora_layer(module, mesh.get_group()))


def cut_adapter(module: Any, adapter: str, style: str, mesh: DeviceMesh) -> None:
    """This rank's parts of one adapter's factors, in their place."""
    group, a, b = mesh.get_group(), module.lora_A[adapter], module.lora_B[adapter]
    if isinstance(b, (CutFactorB, WholeFactorB)):
        return
    if style == COLUMN:
        module.lora_A[adapter] = rebuild(WholeFactorA, a, a.weight, None, group)
        module.lora_B[adapter] = rebuild(CutFactorB, b, part(b.weight, 0, mesh), None, group)
        return
    module.lora_A[adapter] = rebuild(CutFactorA, a, part(a.weight, 1, mesh), None, group)
    module.lora_B[adapter] = rebuild(WholeFactorB, b, b.weight, None, group)
    dropout = module.lora_dropout[adapter]
    if isinstance(dropout, nn.Dropout):
        module.lora_dropout[adapter] = CutDropout(dropout.p).train(dropout.training)
        module.lora_dropout[adapter].group = group


def cut_base(base: nn.Linear, style: str, mesh: DeviceMesh, name: str) -> nn.Module:
    """This rank's part of a frozen linear."""
    dim = 1 if style == ROW else 0
    bias = base.bias if base.bias is None or style == ROW else part(base.bias, 0, mesh)
    if not isinstance(base, NVFP4Linear):
        return rebuild(DENSE[style], base, part(base.weight, dim, mesh), bias, mesh.get_group())
    whole = base.parts()
    parts = NVFP4Parts(part(whole.qdata, dim, mesh), part(whole.scale, dim, mesh), whole.global_scale)
    return packed_layer(base, parts, bias, style, mesh, name)


def empty_part(linear: nn.Module, style: str, mesh: DeviceMesh) -> nn.Module:
    """This rank's part of a dense linear on the meta device, to be filled from a file."""
    assert isinstance(linear, nn.Linear)
    share = [linear.out_features, linear.in_features]
    share[int(style == ROW)] //= mesh.size()
    weight = torch.empty(share, dtype=linear.weight.dtype, device="meta")
    bias = linear.bias if linear.bias is None or style == ROW else weight.new_empty(share[0])
    return rebuild(DENSE[style], linear, weight, bias, mesh.get_group())


def packed_layer(
    whole: NVFP4Linear, parts: NVFP4Parts, bias: Tensor | None, style: str, mesh: DeviceMesh, name: str
) -> nn.Module:
    """A layer with these parts of a whole one, whose features and settings it keeps."""
    new: Any = PACKED[style].from_parts(parts, bias, dtype=whole.dtype, activation=whole.activation, name=name)
    new.in_features, new.out_features, new.group = whole.in_features, whole.out_features, mesh.get_group()
    return new.train(whole.training)


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
