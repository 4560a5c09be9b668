"""Sharded states: low-bit optimizers on sharded adapters, and checkpoints on another number of ranks.

N + M steps equal N, save, load, M bit for bit on the same ranks. On other ranks gradients are summed in another order,
so the adapter agrees to fp32 rounding; the loaded factors themselves are equal bits.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfbyte.optim
from halfbyte.parallel import ddp
from halfbyte.parallel.fsdp2 import fsdp2
from halfbyte.parallel.mesh import data_mesh
from halfbyte.parallel.sharded_checkpoint import load_sharded, save_sharded
from tests.dist import outcomes, run
from tests.parallel.models import LENGTH, VOCABULARY, loss_of, trainable
from tests.parallel.test_agree import text_of_error
from tests.parallel.test_fsdp2 import gathered
from tests.parallel.training import STEPS, Case, error, forward_backward, make

OPTIMIZERS = ["AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8"]
PARTS = 4  # micro-batches of a step, over all ranks
SAVED_AT = 2


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return getattr(halfbyte.optim, name)(parameters, lr=1e-2, min_quant_numel=0)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    share = PARTS // dist.get_world_size()
    for step in steps:
        for part in range(dist.get_rank() * share, (dist.get_rank() + 1) * share):
            forward_backward(Case(), model, step, part, 1 / share)
        optimizer.step()
        optimizer.zero_grad()


def sharded(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fsdp2(make(Case(on_meta=True), dist.get_rank()), data_mesh("cpu"))
    return model, make_optimizer(name, model)


def save_in_the_middle(name: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Adapter at the save and at the end; bytes of states on this rank for each local parameter element."""
    model, optimizer = sharded(name)
    take_steps(model, optimizer, range(SAVED_AT))
    save_sharded(folder, model, optimizer, step=torch.tensor(SAVED_AT))
    at_save = gathered(model)
    take_steps(model, optimizer, range(SAVED_AT, STEPS))
    return at_save, gathered(model), state_bytes(optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> float:
    def size(state: Any) -> int:
        if isinstance(state, dict):
            return sum(size(value) for value in state.values())
        if not isinstance(state, Tensor):
            return 0
        local = state.to_local() if hasattr(state, "to_local") else state
        return local.nbytes if local.numel() > 1 else 0

    elements = sum(p.to_local().numel() for group in optimizer.param_groups for p in group["params"])
    return size(dict(optimizer.state)) / elements


def load_and_go_on(name: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    model, optimizer = sharded(name)
    step = int(load_sharded(folder, model, optimizer, step=torch.tensor(0))["step"])
    at_load = gathered(model)
    take_steps(model, optimizer, range(step, STEPS))
    return at_load, gathered(model), step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_on_two_loaded_on_two_and_four(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    (at_save, end, bytes_zero), (_, _, bytes_one) = run(2, save_in_the_middle, name, folder)
    assert max(bytes_zero, bytes_one) < {"AdamW": 9, "AdamW4bit": 3.0}.get(name, 4.0)  # tiny shards: scales weigh
    at_load, resumed, step = run(2, load_and_go_on, name, folder)[0]
    assert step == SAVED_AT
    assert error(at_load, at_save) == 0
    assert error(resumed, end) == 0
    at_load, resumed, _ = run(4, load_and_go_on, name, folder)[0]
    assert error(at_load, at_save) == 0
    assert error(resumed, end) < (1e-5 if name == "AdamW" else 0.2)


def load_unsharded(name: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same checkpoint in a plain model that nothing shards: one process, or DDP."""
    model = make(Case())
    trained = ddp(model) if dist.get_world_size() > 1 else model
    optimizer = make_optimizer(name, model)
    step = int(load_sharded(folder, trained, optimizer, step=torch.tensor(0))["step"])
    at_load = trainable(model)
    take_steps(trained, optimizer, range(step, STEPS))
    return at_load, trainable(model)


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit"])
def test_saved_on_two_loaded_by_one_process_and_by_ddp(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "step")
    at_save, end, _ = run(2, save_in_the_middle, name, folder)[0]
    for ranks in (1, 2):
        at_load, resumed = run(ranks, load_unsharded, name, folder)[0]
        assert error(at_load, at_save) == 0
        assert error(resumed, end) < (1e-5 if name == "AdamW" else 0.2)


def test_a_kill_between_two_renames_leaves_the_older_folder(tmp_path: Path) -> None:
    """What is there then: the older folder, renamed, and the newer one, complete but still in staging."""
    folder = tmp_path / "step"
    at_save, _, _ = run(2, save_in_the_middle, "AdamW", str(folder))[0]
    folder.rename(tmp_path / "step.replaced")
    for at_load, _, step in run(2, load_and_go_on, "AdamW", str(folder)):
        assert step == SAVED_AT and error(at_load, at_save) == 0
    run(2, save_in_the_middle, "AdamW", str(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def drawn_steps(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
    """Steps on data, and with dropout, drawn from this rank's random state; learning rates."""
    rates = []
    for _ in range(count):
        loss_of(model, torch.randint(0, VOCABULARY, (2, LENGTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return rates


def resumed_with_all_that_steps_depend_on(folder: str) -> tuple[float, bool, list[float]]:
    """N steps, save, M; then fresh objects, load, M: distance of the adapters, whether rates agree, and the rates."""
    rank, ends, rates = f"rng {dist.get_rank()}", [], []
    for resumes in (False, True):
        model = fsdp2(make(Case(dropout=0.3), dist.get_rank()))
        optimizer = make_optimizer("AdamW8bit", model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
        torch.manual_seed(dist.get_rank())
        if not resumes:
            drawn_steps(model, optimizer, scheduler, SAVED_AT)
            save_sharded(folder, model, optimizer, scheduler=scheduler, **{rank: torch.get_rng_state()})
        else:
            extra = load_sharded(folder, model, optimizer, scheduler=scheduler, **{rank: torch.get_rng_state()})
            torch.set_rng_state(extra[rank])
        rates.append(drawn_steps(model, optimizer, scheduler, STEPS - SAVED_AT))
        ends.append(gathered(model))
    return error(ends[1], ends[0]), rates[0] == rates[1], rates[0]


def test_scheduler_and_each_ranks_random_state_are_kept_beside(tmp_path: Path) -> None:
    for distance, same, rates in run(2, resumed_with_all_that_steps_depend_on, str(tmp_path / "step")):
        assert distance == 0 and same and rates[0] > rates[-1]


class Unwritable:
    """A part of the state that cannot be written on rank one."""

    def __reduce__(self) -> tuple:
        raise OSError(28, "No space left on device")


def full_disk(optimizer: torch.optim.Optimizer) -> None:
    raise OSError(28, "No space left on device")


def errors_while_saving(folder: str) -> list[tuple[str, str]]:
    """A rank fails while the state is collected, and while it is written."""
    model, optimizer = sharded("AdamW")
    save_sharded(folder, model, optimizer)
    found = [text_of_error(save_sharded, folder, model, optimizer, odd=Unwritable())]
    if dist.get_rank() == 1:
        optimizer.register_state_dict_pre_hook(full_disk)
    return [*found, text_of_error(save_sharded, folder, model, optimizer)]


def test_a_failed_save_is_the_error_of_all_and_keeps_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    zero, one = run(2, errors_while_saving, str(folder))
    for kind, text in [*zero, *one]:
        assert kind == "RuntimeError" and "No space left on device" in text
    assert zero[1] == one[1] and "rank 1: OSError" in zero[1][1]
    run(2, load_and_go_on_from_the_start, str(folder))


def killed_while_saving(folder: str) -> None:
    """Rank one is killed while its shards are collected for the second save."""
    model, optimizer = sharded("AdamW")
    take_steps(model, optimizer, range(SAVED_AT))
    save_sharded(folder, model, optimizer, step=torch.tensor(SAVED_AT))
    take_steps(model, optimizer, range(SAVED_AT, STEPS))
    if dist.get_rank() == 1:
        optimizer.register_state_dict_pre_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    save_sharded(folder, model, optimizer, step=torch.tensor(STEPS))


def test_killed_while_saving_and_resumed_is_the_same_run(tmp_path: Path) -> None:
    _, expected, _ = run(2, save_in_the_middle, "AdamW", str(tmp_path / "whole"))[0]
    results = outcomes(2, killed_while_saving, str(tmp_path / "step"), grace=1)
    assert results[1].exitcode == -signal.SIGKILL
    for _, resumed, step in run(2, load_and_go_on, "AdamW", str(tmp_path / "step")):
        assert step == SAVED_AT
        assert error(resumed, expected) == 0


def load_and_go_on_from_the_start(folder: str) -> None:
    load_sharded(folder, *sharded("AdamW"))


def missing_folder() -> tuple[str, str]:
    return text_of_error(load_sharded, "no/such/folder", *sharded("AdamW"))


def test_no_checkpoint() -> None:
    zero, one = run(2, missing_folder)
    assert zero == one and "no complete sharded checkpoint" in zero[1]
