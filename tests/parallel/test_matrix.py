"""Every engine with every mode and every optimizer, against one process that accumulates the same micro-batches.

They must agree: the engines differ in who holds what, not in what is computed. The states' blocks are 32 values long,
which here divides every shard and every flat partition, so that each block holds the same values in one process.

Only sums in another order differ, by their last bits (four ranks add what one process adds in turn; DeepSpeed's ZeRO-3
multiplies with a function of its own). Such a bit can move the code of a state by one, and through it a weight by a
few hundredths of a step, which other weights' gradients would then feel. So one process takes every step from the
adapter that the engine had before it: activations' codes and merged weights are then equal, and a state's code that has
moved is one weight that differs, to be counted; of the others each is within a thousandth of a step.
"""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfbyte.optim
from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import weight_digest
from halfbyte.parallel.deepspeed import prepare_for_deepspeed
from halfbyte.parallel.fsdp2 import fsdp2
from halfbyte.parallel.gather import gather_trainable, whole_parts
from halfbyte.parallel.mesh import data_mesh
from tests.dist import run
from tests.parallel import zero
from tests.parallel.models import trainable
from tests.parallel.training import STEPS, Case, error, forward_backward, make

pytestmark = pytest.mark.timeout(1200)  # the first test waits for a compiler
TIMEOUT = 120  # a worker's first call imports deepspeed

ENGINES = {"fsdp2": 2, "hsdp": 4, "zero1": 2, "zero2": 2, "zero3": 2}  # and on how many ranks
MODES = ("plain", "dynamic", "merge-aware", "merge-aware dynamic")
OPTIMIZERS = ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8")
QUICK = {(engine, mode) for engine in ("fsdp2", "hsdp", "zero2", "zero3") for mode in ("plain", "merge-aware dynamic")}
QUICK |= {("fsdp2", "dynamic"), ("fsdp2", "merge-aware")}
BLOCK, LR = 32, 1e-2


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The op that DeepSpeed needs on a CPU, compiled before any rank asks for it."""
    if not zero.OP.exists():
        subprocess.run([sys.executable, "-m", "tests.parallel.build_deepspeed_op"], check=True, timeout=1100)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=LR)
    return getattr(halfbyte.optim, name)(parameters, lr=LR, min_quant_numel=0, block_size=BLOCK)


@dataclass
class Run:
    """Losses of each step, averaged over micro-batches; the whole adapter after each; is the base as it was?"""

    losses: list[float]
    adapters: list[dict[str, Tensor]]
    base_is_intact: bool = True


def one_process(mode: str, name: str, ranks: int, adapters: list[dict[str, Tensor]]) -> Run:
    """The same run, where each step but the first starts from the adapter given as that of the step before."""
    model = make(Case(mode=mode))
    optimizer = make_optimizer(name, [p for p in model.parameters() if p.requires_grad])
    found = Run([], [])
    for step in range(STEPS):
        if step > 0:
            model.load_state_dict(adapters[step - 1], strict=False)
        losses = [forward_backward(Case(), model, step, part, 1 / ranks) for part in range(ranks)]
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(sum(losses) / ranks)
        found.adapters.append(trainable(model))
    return found


def this_rank(engine: str, mode: str) -> dict[str, Run]:
    """Of each optimizer."""
    found = {}
    for name in OPTIMIZERS:
        model = make(Case(mode=mode, on_meta=True, differently_seeded=True), dist.get_rank())
        trained, steps = (
            start_zero(engine, model, name) if engine.startswith("zero") else start_fsdp(engine, model, name)
        )
        losses, adapters = [], []
        for step in range(STEPS):
            losses.append(steps(step))
            adapters.append(gather_trainable(trained))
        found[name] = Run(mean_over_ranks(losses), adapters, base_is_intact(trained, mode))
    return found


def start_fsdp(engine: str, model: nn.Module, name: str) -> tuple[nn.Module, Callable[[int], float]]:
    fsdp2(model, data_mesh("cpu", replicate=2 if engine == "hsdp" else 1))
    optimizer = make_optimizer(name, [p for p in model.parameters() if p.requires_grad])

    def take_step(step: int) -> float:
        loss = forward_backward(Case(), model, step, dist.get_rank(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, take_step


def start_zero(engine: str, model: nn.Module, name: str) -> tuple[nn.Module, Callable[[int], float]]:
    settings = prepare_for_deepspeed(model, zero.config(int(engine[-1])))
    started = zero.initialize(model, settings, functools.partial(make_optimizer, name))
    return started.module, lambda step: zero.take_steps(started, range(step, step + 1))[0]


def mean_over_ranks(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def base_is_intact(model: nn.Module, mode: str) -> bool:
    """Of the whole layers, gathered from the ranks."""
    whole = {name: whole_parts(layer) for name, layer in nvfp4_modules(model).items()}
    layers = nvfp4_modules(make(Case(mode=mode)))
    return all(weight_digest(whole[name]) == weight_digest(layer.parts()) for name, layer in layers.items())


def moved_otherwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Share of an adapter's weights that are further off than a thousandth of a step."""
    assert found.keys() == expected.keys()
    off = [((found[name] - weight).abs() > LR / 1000).flatten() for name, weight in expected.items()]
    return torch.cat(off).float().mean().item()


def flipped_codes(mode: str, found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Share of the merged weight's bytes in which two adapters differ."""
    merged = []
    for adapter in (found, expected):
        model = make(Case(mode=mode))
        model.load_state_dict(adapter, strict=False)
        merged.append([layer.merged_weight().qdata for layer in merge_aware_layers(model).values()])
    pairs = list(zip(*merged, strict=True))
    return sum((a != b).sum().item() for a, b in pairs) / max(1, sum(a.numel() for a, _ in pairs))


CELLS: list[Any] = [
    pytest.param(engine, mode, marks=[] if (engine, mode) in QUICK else [pytest.mark.slow])
    for engine in ENGINES
    for mode in MODES
]


@pytest.mark.parametrize(("engine", "mode"), CELLS)
def test_equals_one_process(engine: str, mode: str, one_thread: None) -> None:
    for found in run(ENGINES[engine], this_rank, engine, mode, timeout=TIMEOUT):
        for name, trained in found.items():
            expected = one_process(mode, name, ENGINES[engine], trained.adapters)
            assert trained.base_is_intact
            assert trained.losses == pytest.approx(expected.losses, rel=1e-6)
            pairs = list(zip(trained.adapters, expected.adapters, strict=True))
            assert max(error(*pair) for pair in pairs) < (1e-5 if name == "AdamW" else 1e-3)
            moved = [moved_otherwise(*pair) for pair in pairs]
            assert max(moved) <= (0 if name == "AdamW" else 1e-3), (name, moved)
            assert flipped_codes(mode, *pairs[-1]) < 1e-3
