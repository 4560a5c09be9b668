"""What the ranks of the distributed optimizer tests run; importable by the workers of tests.dist."""

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import halfbyte.optim
from halfbyte.optim.sharding import own_slice, to_dtensor


def build(dtype: torch.dtype = torch.float32, hidden: int = 33) -> nn.Sequential:
    """The same weights on every rank: (hidden, 512), which is quantized, (64, hidden), which is not by default."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(512, hidden), nn.Tanh(), nn.Linear(hidden, 64)).to(dtype)


def optimizer_of(name: str, params: Any, **options: Any) -> halfbyte.optim.AdamW:
    return getattr(halfbyte.optim, name)(params, **{"lr": 1e-2, **options})


def backward(model: nn.Module, step: int, dtype: torch.dtype) -> None:
    """The same batch on every rank, so that averaging gradients over ranks is exact."""
    batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(batch).float().square().mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step, dtype)
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def whole_states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    states = optimizer.state_dict()["state"]
    return {index: {key: whole(value) for key, value in state.items()} for index, state in states.items()}


def one_process(name: str, dtype: torch.dtype, hidden: int, options: dict, steps: int) -> tuple:
    """(parameters, states) after training without any mesh."""
    model = build(dtype, hidden)
    optimizer = optimizer_of(name, model.parameters(), **options)
    train(model, optimizer, steps, dtype)
    return whole_params(model), whole_states(optimizer)


def fsdp2(name: str, dtype: torch.dtype, hidden: int, options: dict, steps: int) -> tuple:
    """The same under `fully_shard`."""
    model = build(dtype, hidden)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = optimizer_of(name, model.parameters(), **options)
    train(model, optimizer, steps, dtype)
    return whole_params(model), whole_states(optimizer)


def tensor_parallel_fsdp2(name: str, options: dict, path: str) -> tuple:
    """Column- and row-wise layers under `fully_shard` on a 2 x 2 mesh: parameters, states, and states through DCP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def sharded_model() -> nn.Sequential:
        model = build(torch.bfloat16, 512)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"])

    model = sharded_model()
    optimizer = optimizer_of(name, model.parameters(), **options)
    for step in range(3):
        for i, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
            param.grad = distribute_tensor_like(grad, param)
        optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)
    other = sharded_model()
    fresh = optimizer_of(name, other.parameters(), **options)
    state_dict = {"optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(state_dict, checkpoint_id=path)
    set_optimizer_state_dict(other, fresh, state_dict["optimizer"])
    return whole_params(model), whole_states(optimizer), whole_states(fresh)


def distribute_tensor_like(value: Tensor, param: Any) -> DTensor:
    """The whole value, sharded as the parameter is (strided shards included, which distribute_tensor refuses)."""
    return to_dtensor(own_slice(value, param).contiguous(), param, tuple(value.shape))


def given_grads(name: str, options: dict) -> tuple:
    """The same steps on one process."""
    model = build(torch.bfloat16, 512)
    optimizer = optimizer_of(name, model.parameters(), **options)
    for step in range(3):
        for i, param in enumerate(model.parameters()):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + i)).bfloat16()
        optimizer.step()
    return whole_params(model), whole_states(optimizer)


def ddp(name: str, seed_by_rank: bool, folder: str) -> tuple:
    """o15: ranks whose torch RNGs differ; returns weights, whether the RNG was left alone, and weights of a resume."""
    model = DistributedDataParallel(build(torch.bfloat16))
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    optimizer = optimizer_of(name, model.parameters(), bf16_stochastic_round=True)
    rng = torch.get_rng_state()
    train(model, optimizer, 3, torch.bfloat16)
    untouched = torch.equal(rng, torch.get_rng_state())
    buffer = io.BytesIO()
    torch.save((model.module.state_dict(), optimizer.state_dict()), buffer)
    train(model, optimizer, 2, torch.bfloat16, first=3)
    resumed = build(torch.bfloat16)
    weights, state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    resumed.load_state_dict(weights)
    other = optimizer_of(name, resumed.parameters(), bf16_stochastic_round=True)
    other.load_state_dict(state)
    train(resumed, other, 2, torch.bfloat16, first=3)
    return whole_params(model.module), untouched, whole_params(resumed)


def tensor_parallel(name: str, placement_dim: int, shape: tuple[int, int], options: dict, path: str | None) -> tuple:
    """o14: one parameter sharded along a dimension; returns it after 3 steps, and the states gathered."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param, optimizer = _sharded_param(name, mesh, [Shard(placement_dim)], shape, options)
    for step in range(3):
        _give_grad(param, step)
        optimizer.step()
    if path is not None:
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return whole(param), whole_states(optimizer)[0]


def mesh_2d(name: str, sizes: tuple[int, int], placements: str, shape: tuple[int, int], options: dict) -> tuple:
    """o3: a parameter on a 2-D mesh; the letters say r (replicate), 0 or 1 (shard along it) for each axis."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
    kinds = [Replicate() if letter == "r" else Shard(int(letter)) for letter in placements]
    param, optimizer = _sharded_param(name, mesh, kinds, shape, options)
    for step in range(3):
        _give_grad(param, step)
        optimizer.step()
    return whole(param), whole_states(optimizer)[0]


def _sharded_param(name: str, mesh: Any, placements: list, shape: tuple[int, int], options: dict) -> tuple:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    value = value.to(options.get("dtype", torch.float32))
    param = nn.Parameter(distribute_tensor(value, mesh, placements))
    return param, optimizer_of(name, [param], **{k: v for k, v in options.items() if k != "dtype"})


def _give_grad(param: Any, step: int) -> None:
    grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(param.dtype)
    param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad


def plain(name: str, shape: tuple[int, int], options: dict, path: str | None = None, steps: int = 3) -> tuple:
    """The same parameter without a mesh; with a path, its states come from a DCP folder instead of from steps."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(options.get("dtype", torch.float32))
    param = nn.Parameter(value)
    optimizer = optimizer_of(name, [param], **{k: v for k, v in options.items() if k != "dtype"})
    for step in range(1 if path else steps):
        _give_grad(param, step)
        optimizer.step()
    if path:
        state_dict = {"optimizer": optimizer.state_dict()}
        dcp.load(state_dict, checkpoint_id=path, no_dist=not dist.is_initialized())
        with warnings.catch_warnings(record=True):
            optimizer.load_state_dict(state_dict["optimizer"])
    return param.detach(), whole_states(optimizer)[0]


def dcp_save(name: str, path: str, hidden: int, options: dict, asynchronous: bool) -> dict:
    """Train 3 steps under FSDP2 and save with torch.distributed.checkpoint; returns the states gathered."""
    model = build(hidden=hidden)
    fully_shard(model)
    optimizer = optimizer_of(name, model.parameters(), **options)
    train(model, optimizer, 3, torch.float32)
    state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    if asynchronous:
        dcp.async_save(state_dict, checkpoint_id=path).result()
    else:
        dcp.save(state_dict, checkpoint_id=path)
    return whole_states(optimizer)


def dcp_load(name: str, path: str, hidden: int, options: dict, shard: bool = True) -> tuple[dict, list[str]]:
    """Load that folder into a fresh model, however many ranks there are: (states gathered, warnings)."""
    model = build(hidden=hidden)
    if shard:
        fully_shard(model)
    optimizer = optimizer_of(name, model.parameters(), **options)
    state_dict = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state_dict, checkpoint_id=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_optimizer_state_dict(model, optimizer, state_dict["optimizer"])
    said = [str(w.message) for w in caught if "converted on load" in str(w.message)]
    states = whole_states(optimizer)
    train(model, optimizer, 1, torch.float32, first=3)
    return states, said


def full_state_dict(name: str, from_rank_zero: bool, flatten: bool) -> tuple[dict, dict, int]:
    """o12: gather a full state dict, set it on a fresh sharded optimizer: both gathered states, and lr's step count."""
    model = build()
    fully_shard(model)
    optimizer = optimizer_of(name, model.parameters())
    train(model, optimizer, 3, torch.float32)
    options = StateDictOptions(full_state_dict=True, cpu_offload=from_rank_zero)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    other = build()
    fully_shard(other)
    fresh = optimizer_of(name, other.parameters(), lr=5.0)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_zero)
    if from_rank_zero and dist.get_rank() != 0:
        full = {}
    set_optimizer_state_dict(other, fresh, full, options=options)
    if flatten:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(other, fresh, flat, options=options)
    return whole_states(optimizer), whole_states(fresh), fresh.param_groups[0]["lr"]


def fsdp1(use_orig_params: bool) -> str:
    """o10: what the optimizer says about FSDP1's flat parameters."""
    model = FullyShardedDataParallel(build(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    try:
        optimizer_of("AdamW8bit", model.parameters())
    except ValueError as error:
        return str(error)
    return "accepted"


def zero_redundancy(name: str) -> tuple[dict, dict, dict]:
    """ZeroRedundancyOptimizer: weights after 3 steps, and a consolidated state dict, loaded and stepped again."""
    model = DistributedDataParallel(build())
    options = {"optimizer_class": getattr(halfbyte.optim, name), "lr": 1e-2}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **options)
    train(model, optimizer, 3, torch.float32)
    weights = whole_params(model.module)
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    other = DistributedDataParallel(build())
    other.module.load_state_dict(model.module.state_dict())
    fresh = ZeroRedundancyOptimizer(other.parameters(), **options)
    fresh.load_state_dict(copy.deepcopy(box[0]))  # ZeroRedundancyOptimizer keeps the very tensors it is given
    train(model, optimizer, 2, torch.float32, first=3)
    train(other, fresh, 2, torch.float32, first=3)
    return weights, whole_params(model.module), whole_params(other.module)
