"""ZeRO-3 from rank zero's weights, one block at a time.

`deepspeed.initialize` partitions the model that it is given, so each rank would first need all of it on its GPU. Given
a module, `deepspeed.zero.Init` broadcasts rank zero's parameters and keeps this rank's parts; so blocks get memory in
turn, and a rank never holds more than its parts and one block. Rejected: building the model inside of Init, as
transformers does, where every rank reads the file, and a rank that read another one goes unnoticed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfbyte.parallel.agree import CHECK_TIMEOUT_S, agree
from halfbyte.parallel.broadcast import broadcast_tensors, group_device
from halfbyte.parallel.compare import compare_models
from halfbyte.parallel.digests import tensor_digest
from halfbyte.parallel.fsdp2 import transformer_blocks


@torch.no_grad()
def partition_from_rank_zero(
    model: nn.Module, config: dict[str, Any], *, dtype: torch.dtype | None = None, timeout: float = CHECK_TIMEOUT_S
) -> None:
    """Partition the parameters in place, compare them by digest, and give every rank rank zero's buffers.

    model    on rank zero with its weights, on the CPU if a GPU cannot hold them; elsewhere on the meta device, or with
             weights, which are overwritten.
    config   DeepSpeed's; its zero_optimization says where parts are kept.
    dtype    what the engine casts floating parameters to; it leaves those alone that are partitioned already.
    raises   as `synchronize`, on every rank.
    """
    compare_models(model, timeout=timeout)
    start_deepspeed()
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    expected = {name: tensor_digest(p) for name, p in model.named_parameters()} if dist.get_rank() == 0 else {}
    send_buffers(model)
    holders = holders_of(model)
    for block in [*transformer_blocks(model), model]:
        partition(block, holders, init_config(config))
    compare_parts(model, expected, timeout)


def start_deepspeed() -> None:
    """Let DeepSpeed use the process group that there is."""
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=dist.get_backend())


def init_config(config: dict[str, Any]) -> dict[str, Any]:
    """What `zero.Init` reads: where parts are kept. Left to `Trainer` ("auto") are sizes, which the engine reads."""
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def holders_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter is registered: a tied one at several places."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((module, name))
    return holders


def partition(block: nn.Module, holders: dict[int, list[tuple[nn.Module, str]]], config: dict[str, Any]) -> None:
    """Give memory to what a block has on the meta device, and partition all of it that is not partitioned yet."""
    import deepspeed

    for parameter in list(block.parameters()):
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=group_device())
            fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            for module, name in holders[id(parameter)]:
                module.register_parameter(name, fresh)
    deepspeed.zero.Init(module=block, config_dict_or_path=config)


@contextmanager
def gathering(model: nn.Module) -> Iterator[None]:
    """Let a partitioned model compute before an engine holds it: each block is whole during its own forward.

    All ranks call the model alike. Does nothing to a model that is not partitioned.
    """
    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        yield
        return
    import deepspeed

    blocks = transformer_blocks(model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    whole: list[Any] = []

    def enter(block: nn.Module, _: Any) -> None:
        whole.append(deepspeed.zero.GatheredParameters(list(block.parameters())))
        whole[-1].__enter__()

    def leave(*_: Any) -> None:
        whole.pop().__exit__(None, None, None)

    hooks = [hook for b in blocks for hook in (b.register_forward_pre_hook(enter), b.register_forward_hook(leave))]
    try:
        with deepspeed.zero.GatheredParameters([p for p in model.parameters() if id(p) not in inside]):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def send_buffers(model: nn.Module) -> None:
    """Rank zero's buffers on every rank's device; they are never partitioned."""
    for module in model.modules():
        persistent = module.state_dict(keep_vars=True).keys()
        for name, buffer in list(module.named_buffers(recurse=False)):
            here = torch.empty_like(buffer, device=group_device()) if buffer.is_meta else buffer.to(group_device())
            module.register_buffer(name, here, persistent=name in persistent)
    broadcast_tensors(model.buffers())


def compare_parts(model: nn.Module, expected: dict[str, int], timeout: float) -> None:
    """RuntimeError on every rank when the parts do not add up to what rank zero had. Gathers a tensor at a time."""
    import deepspeed

    wrong = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0 and tensor_digest(parameter) != expected[name]:
                wrong.append(name)
    wrong = agree("Comparing the partitioned model's bytes", wrong, timeout=timeout)[0]
    if wrong:
        raise RuntimeError(
            f"The parts of the ranks do not add up to rank 0's model: {wrong[0]} and {len(wrong) - 1} more. "
            "Bytes were damaged on the way: check the machine's links and memory."
        )
