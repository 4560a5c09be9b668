"""Stepping inside backward gives the same weights, and no more than one gradient at a time."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW8bit
from halfbyte.optim.gradient_release import GradientRelease, gradient_bytes
from tests import dist
from tests.optim.training import ADAMW, states_equal


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).bfloat16()


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = torch.randn(4, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
    return model(batch).float().square().mean()


@pytest.mark.parametrize("cls", ADAMW)
def test_same_as_stepping_afterwards(cls: type) -> None:
    """Bit for bit, with two groups, a scheduler and stochastic rounding; gradients are gone when backward returns."""
    model, other = model_of(), model_of()

    def optimizer_of(m: nn.Module) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in m.parameters() if p.dim() > 1], [p for p in m.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return cls(groups, lr=1e-2, bf16_stochastic_round=True)

    released, plain = optimizer_of(model), optimizer_of(other)
    release = GradientRelease(model, released)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (released, plain)]
    for step in range(4):
        loss_of(model, step).backward()
        assert all(param.grad is None for param in model.parameters())
        released.step()
        loss_of(other, step).backward()
        plain.step()
        plain.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert states_equal(released, plain)
    released.load_state_dict(copy.deepcopy(plain.state_dict()))  # a load in between is noticed
    for optimizer, m in ((released, model), (plain, other)):
        optimizer.param_groups[0]["lr"] = 3e-2  # a load makes new groups
        loss_of(m, 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert states_equal(released, plain)
    release.remove()
    loss_of(model, 9).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_saving_is_measured() -> None:
    """The most gradient bytes alive at once during backward: all of them, or those of one layer at a time."""
    alive = {}
    for release in (False, True):
        model = model_of()
        most = [0]

        def count(param: torch.Tensor, model: nn.Module = model, most: list = most) -> None:
            most[0] = max(most[0], sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)
        optimizer = AdamW8bit(model.parameters())
        if release:
            GradientRelease(model, optimizer)
        loss_of(model, 0).backward()
        alive[release] = most[0]
    assert (alive[False], alive[True]) == gradient_bytes(model_of().parameters())


def refuses_ddp() -> str:
    model = nn.parallel.DistributedDataParallel(model_of())
    try:
        GradientRelease(model, AdamW8bit(model.parameters()))
    except ValueError as error:
        return str(error)
    return ""


def test_model_and_optimizer_are_freed() -> None:
    """Hooks lie where the garbage collector does not look; a hook that led back to its parameter would keep all."""
    model = model_of()
    optimizer = AdamW8bit(model.parameters(), offload_states=True)
    GradientRelease(model, optimizer)
    loss_of(model, 0).backward()
    gone = weakref.ref(optimizer), weakref.ref(model[0].weight)
    del optimizer, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_backward_pass_without_the_optimizer_is_refused() -> None:
    model = model_of()
    GradientRelease(model, AdamW8bit(model.parameters()))
    gc.collect()
    with pytest.raises(RuntimeError, match="the optimizer that gradient release steps is gone"):
        loss_of(model, 1).backward()


def test_ddp_is_refused() -> None:
    assert all("averaged" in said for said in dist.run(2, refuses_ddp, timeout=200.0))
