"""One training run, as one process that accumulates and as ranks under DDP; the same micro-batches in both."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfbyte.lora.merge_aware import make_merge_aware
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel import ddp
from tests.parallel.models import batch, loss_of, tiny_lora, trainable

STEPS = 5


@dataclass(frozen=True)
class Case:
    """What a comparison varies."""

    dtype: torch.dtype = torch.float32
    packed: bool = True
    plain: bool = False  # torch's class alone, without our check
    accumulate: int = 1
    checkpointing: bool | None = None  # None, or use_reentrant
    dropout: float = 0.0
    unused: bool = False  # an extra trainable layer that forward never calls
    differently_seeded: bool = False  # every rank draws its own adapter; rank zero's must win
    on_meta: bool = False  # ranks above zero have no weights
    short_last: bool = False  # rank zero has one batch more than the others: join
    mode: str = "plain"  # or dynamic, merge-aware, "merge-aware dynamic"
    device: str = "cpu"
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """Losses and gradients of every step, and the adapter at the end."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    adapter: dict[str, Tensor]


def make(case: Case, rank: int = 0) -> nn.Module:
    model = tiny_lora(
        dtype=case.dtype,
        adapter_seed=rank if case.differently_seeded else 0,
        dropout=case.dropout,
        packed=case.packed,
        device="meta" if case.on_meta and rank else case.device,
    )
    if "dynamic" in case.mode:
        for layer in nvfp4_modules(model).values():
            layer.activation = ActivationQuant()
    if "merge-aware" in case.mode:
        make_merge_aware(model, cache=False)
    if case.unused:
        model.spare = nn.Linear(3, 3)
    if case.checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing})
    return model.train()


def micro_batches(case: Case, step: int, rank: int) -> list[int]:
    """Numbers of the micro-batches that a rank works on in a step."""
    if case.short_last and step == STEPS - 1 and rank > 0:
        return []
    return [rank * case.accumulate + part for part in range(case.accumulate)]


def forward_backward(case: Case, model: nn.Module, step: int, part: int, weight: float) -> float:
    torch.manual_seed(10_000 + 100 * step + part)  # the dropout mask belongs to the micro-batch, wherever it runs
    loss = loss_of(model, batch(step, part))
    (loss * weight).backward()
    return loss.item()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def one_process(
    case: Case, world_size: int, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
) -> Trace:
    """Accumulate all ranks' micro-batches in one process: what DDP must reproduce."""
    model = make(case)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    trace = Trace([], [], {})
    for step in range(STEPS):
        losses = [
            forward_backward(case, model, step, part, 1 / (world_size * case.accumulate))
            for rank in range(world_size)
            for part in micro_batches(case, step, rank)
        ]
        finish_step(model, optimizer, losses, trace)
    trace.adapter = trainable(model)
    return trace


def this_rank(case: Case) -> Trace:
    """The same run, as one rank of a group."""
    rank = dist.get_rank()
    model = make(case, rank)
    wrapped = DistributedDataParallel(model, **case.ddp) if case.plain else ddp(model, **case.ddp)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    trace = Trace([], [], {})
    with wrapped.join(enable=case.short_last):
        for step in range(STEPS):
            parts = micro_batches(case, step, rank)
            if not parts:
                break
            losses = []
            for part in parts:
                last = part == parts[-1]
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    losses.append(forward_backward(case, wrapped, step, part, 1 / case.accumulate))
            finish_step(wrapped, optimizer, losses, trace)
    trace.adapter = trainable(wrapped)
    return trace


def finish_step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float], trace: Trace) -> None:
    trace.losses.append(sum(losses) / len(losses))
    trace.grads.append(
        {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    )
    optimizer.step()
    optimizer.zero_grad()


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest distance of a tensor from the expected one, relative to that one's norm."""
    assert found.keys() == expected.keys()
    return max(((found[n] - e).norm() / e.norm().clamp_min(1e-12)).item() for n, e in expected.items())


def worst_gradient(found: Trace, expected: Trace) -> float:
    return max(error(f, e) for f, e in zip(found.grads, expected.grads, strict=True))
