"""FSDP2 (`fully_shard`) around a model with a frozen NVFP4 base.

The packed base is ordinary uint8 parameters, so FSDP2 shards it as it is: a rank holds 1/N of the bytes, and gathers
one transformer block at a time. What is added here: all ranks are compared before, rank zero alone needs the weights,
and a digest over all shards is compared after. Sharding a rank's own full copy, as `fully_shard` alone does, would
need every rank to read the file, and would hide a rank that read another one.

Needs torch 2.13: earlier versions let FSDP2 cast or refuse parameters that are not floating.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.utils import get_total_norm
from torch.torch_version import TorchVersion

from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.optim.sharding import is_dtensor, local_region, local_tensor, own_slice
from halfbyte.parallel.agree import CHECK_TIMEOUT_S, agree
from halfbyte.parallel.broadcast import broadcast_tensors, group_device
from halfbyte.parallel.compare import compare_models
from halfbyte.parallel.describe import named_tensors
from halfbyte.parallel.digests import digest_sums, row_digest
from halfbyte.parallel.materialize import has_meta
from halfbyte.parallel.mesh import REPLICATE, SHARD, data_mesh, mesh_device

FIRST_TORCH = "2.13"
CHUNK_BYTES = 256 * 2**20  # of full tensors held at once while shards are cut from them


def fsdp2(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    blocks: list[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    timeout: float = CHECK_TIMEOUT_S,
) -> nn.Module:
    """Compare, shard in place, fill from rank zero, compare digests. Call it before the optimizer is made.

    model    on rank zero with its weights (on the CPU, if the GPU cannot hold them); elsewhere with weights, which are
             overwritten, or on the meta device.
    mesh     1-D, or 2-D (replicate, shard) for HSDP; None shards over all ranks. See `data_mesh`.
    blocks   modules that are gathered one at a time; None means the model's own `_no_split_modules`.
    mp_policy, offload_policy, reshard_after_forward   as for `fully_shard`. Nothing of the base is ever cast, nor are
             the factors of merge-aware layers: the weight they train must be the one that is written.
    memory   1/N of the model, one gathered block, and 256 MiB while it is filled.
    raises   RuntimeError for a torch that is too old; ValueError and RuntimeError as `synchronize`, on every rank.
    """
    check_torch()
    return shard_model(model, mesh, blocks, mp_policy, offload_policy, reshard_after_forward, timeout)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    blocks: list[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
    timeout: float = CHECK_TIMEOUT_S,
) -> nn.Module:
    """`fsdp2`, whatever the version of torch."""
    mesh = mesh if mesh is not None else data_mesh(default_device_type())
    check_mesh(mesh)
    check_offload(offload_policy)
    blocks = blocks if blocks is not None else transformer_blocks(model)
    compare_models(model, timeout=timeout)
    for layer in merge_aware_layers(model).values():
        layer.keep = False  # a kept W' would be an unsharded copy of the base on every rank
    full = {name: t.detach() for name, t in named_tensors(model).items()} if dist.get_rank() == 0 else None
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "offload_policy": offload_policy or OffloadPolicy(),
        "reshard_after_forward": reshard_after_forward,
    }
    inner = options | {
        "mp_policy": replace(options["mp_policy"], output_dtype=None)
    }  # what leaves a block stays inside
    for block in blocks:
        if options["mp_policy"].param_dtype is not None:
            keep_factors(block, **inner)
        fully_shard(block, **inner)
    fully_shard(model, **options)
    if has_meta(model):
        offloaded = isinstance(offload_policy, CPUOffloadPolicy)
        model.to_empty(device="cpu" if offloaded else mesh_device(mesh))
    fill_from_rank_zero(model, full)
    compare_shards(model, full, mesh, timeout=timeout)
    return model


def keep_factors(block: nn.Module, *, mp_policy: MixedPrecisionPolicy, **options: Any) -> None:
    """Make the merge-aware layers of a block a group of their own, whose parameters no policy casts.

    W' is rounded from the factors as they are stored; from factors cast to bf16 another W' would be trained.
    """
    layers: list[nn.Module] = [*merge_aware_layers(block).values()]
    if layers:
        uncast = replace(mp_policy, param_dtype=None, cast_forward_inputs=False)
        fully_shard(layers, mp_policy=uncast, **options)


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Scale gradients to a global 2-norm of at most max_norm; returns the norm.

    As torch's `clip_grad_norm_`, and also where the shards are offloaded to the CPU and the ranks talk over NCCL.
    """
    grads = [local_tensor(p.grad) for p in model.parameters() if p.grad is not None]
    square = get_total_norm(grads).float().square().to(mesh_device(mesh))
    dist.all_reduce(square, group=mesh.get_group(SHARD))
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


def shard_new_adapter(
    model: nn.Module, mesh: DeviceMesh, *, blocks: list[nn.Module] | None = None, **options: Any
) -> nn.Module:
    """Shard parameters that were added after `fsdp2`, such as a fresh adapter, from rank zero's values.

    Each block's new parameters form a group of their own. `options` as for `fully_shard`.
    """
    new = {id(p) for p in model.parameters() if not is_dtensor(p)}
    fresh = {name: p.detach() for name, p in model.named_parameters() if id(p) in new}
    full = fresh if dist.get_rank() == 0 else None
    ignored = {p for p in model.parameters() if id(p) not in new}
    for block in blocks if blocks is not None else transformer_blocks(model):
        holders = [m for m in block.modules() if owns_new(m, new)]
        if holders:
            fully_shard(holders, mesh=mesh, ignored_params=ignored, **options)
    left = [name for name, p in model.named_parameters() if not is_dtensor(p)]
    if left:
        raise ValueError(f"{left[0]} lies outside the blocks, and was added after sharding. Add it before `fsdp2`.")
    fill_from_rank_zero(model, full, names=sorted(fresh))
    return model


def owns_new(module: nn.Module, new: set[int]) -> bool:
    """True for the outermost modules that PEFT made: those with an adapter below and a base layer beside it."""
    return hasattr(module, "base_layer") and any(id(p) in new for p in module.parameters())


def check_torch() -> None:
    """RuntimeError when FSDP2 of this torch does not leave non-floating parameters alone."""
    if TorchVersion(torch.__version__) < FIRST_TORCH:
        raise RuntimeError(
            f"FSDP2 with an NVFP4 base needs torch {FIRST_TORCH} or later, this is {torch.__version__}: earlier "
            "versions refuse or cast parameters that are not floating. Update torch, or train with DDP or DeepSpeed."
        )


def check_mesh(mesh: DeviceMesh) -> None:
    """ValueError for a mesh that FSDP2 cannot use: more than two dimensions, or not all ranks."""
    if mesh.ndim > 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions, expected (shard,) or (replicate, shard); make it with "
            "halfbyte.parallel.data_mesh"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh {tuple(mesh.mesh.shape)} has {mesh.size()} ranks, but {dist.get_world_size()} were started. "
            "Make it with halfbyte.parallel.data_mesh."
        )


def check_offload(policy: OffloadPolicy | None) -> None:
    """ValueError for pinned memory, which is torch's default, on a machine without an accelerator."""
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        raise ValueError(
            "CPUOffloadPolicy() pins memory for an accelerator, and this machine has none. Use "
            "CPUOffloadPolicy(pin_memory=False)."
        )


def default_device_type() -> str:
    """cuda where NCCL is the backend, else cpu."""
    return "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend()) else "cpu"


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that the model says must not be split, e.g. its decoder layers. ValueError when it says nothing."""
    classes: set[str] = set()
    for module in model.modules():
        classes |= set(getattr(module, "_no_split_modules", None) or ())
    # The whole ancestry, since `fully_shard` puts a subclass in the place of a module's class.
    blocks = [m for m in model.modules() if classes & {ancestor.__name__ for ancestor in type(m).__mro__}]
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} does not say which modules are its blocks (_no_split_modules). "
            "Pass them: fsdp2(model, blocks=list(model.layers))."
        )
    return blocks


@torch.no_grad()
def fill_from_rank_zero(model: nn.Module, full: dict[str, Tensor] | None, names: list[str] | None = None) -> None:
    """Overwrite every shard and buffer with its part of rank zero's tensor.

    full   on rank zero, the whole tensors by name; None elsewhere.
    """
    tensors = named_tensors(model)
    device = group_device()
    for chunk in chunks({name: tensors[name] for name in names or sorted(tensors)}):
        whole = {
            name: full[name] if full is not None else torch.empty(t.shape, dtype=t.dtype, device=device)
            for name, t in chunk.items()
        }
        broadcast_tensors(whole.values())
        for name, tensor in chunk.items():
            local_tensor(tensor).copy_(own_slice(whole[name], tensor))


def chunks(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Cut into dicts of about CHUNK_BYTES of global size; a tied tensor comes once."""
    chunk: dict[str, Tensor] = {}
    seen: set[int] = set()
    size = 0
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        chunk[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk


def compare_shards(
    model: nn.Module, full: dict[str, Tensor] | None, mesh: DeviceMesh, *, timeout: float = CHECK_TIMEOUT_S
) -> None:
    """RuntimeError on all ranks when the shards of a copy do not add up to rank zero's tensors."""
    expected = {name: row_digest(t) for name, t in full.items()} if full is not None else {}
    found = {}
    for name, tensor in named_tensors(model).items():
        if is_dtensor(tensor):
            _, offset = local_region(tensor)
            found[name] = row_digest(local_tensor(tensor).detach(), row_offset=offset[0])
    copy = mesh.get_local_rank(REPLICATE) if mesh.ndim == 2 else 0
    payload = {"copy": copy, "shards": found, "expected": expected}
    payloads = agree("Comparing the sharded model's bytes", payload, timeout=timeout)
    for copy, sums in digest_sums(payloads).items():
        wrong = [name for name, total in sums.items() if total != payloads[0]["expected"][name]]
        if wrong:
            raise RuntimeError(
                f"The shards of copy {copy} do not add up to rank 0's model: {wrong[0]} and {len(wrong) - 1} more. "
                "Bytes were damaged on the way: check the machine's links and memory."
            )
