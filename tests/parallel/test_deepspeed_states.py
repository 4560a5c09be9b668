"""Low-bit optimizers as DeepSpeed's client optimizer, and its checkpoints.

ZeRO hands the optimizer flat fp32 partitions, so states are cut into blocks over the partition, not over a parameter.
N + M steps equal N, save, load, M: the same operations on the same bits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import halfbyte.optim
from halfbyte.parallel.deepspeed import prepare_for_deepspeed
from halfbyte.parallel.gather import gather_trainable
from tests.dist import run
from tests.parallel import zero
from tests.parallel.test_deepspeed import TIMEOUT, built  # noqa: F401 - the fixture that compiles the op
from tests.parallel.training import STEPS, Case, error, forward_backward, make, one_process

pytestmark = pytest.mark.timeout(1200)  # the first test waits for a compiler
SAVED_AT = 2


def start(name: str, stage: int) -> Any:
    model = make(Case(), dist.get_rank())
    settings = prepare_for_deepspeed(model, zero.config(stage))

    def optimizer(parameters: list) -> torch.optim.Optimizer:
        if name == "AdamW":
            return torch.optim.AdamW(parameters, lr=1e-2)
        return getattr(halfbyte.optim, name)(parameters, lr=1e-2, min_quant_numel=0)

    return zero.initialize(model, settings, optimizer)


def save_in_the_middle(name: str, stage: int, folder: str) -> tuple[dict[str, Tensor], float, bool]:
    """The adapter at the end; its distance from fp32 AdamW's; whether the moments are held in low precision."""
    engine = start(name, stage)
    zero.take_steps(engine, range(SAVED_AT))
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    zero.take_steps(engine, range(SAVED_AT, STEPS))
    end = gather_trainable(engine.module)
    states = [t for s in engine.optimizer.optimizer.state.values() for t in tensors_in(s) if t.numel() > 1]
    return end, error(end, one_process(Case(), 2).adapter), any(t.element_size() == 1 for t in states)


def tensors_in(state: Any) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_in(value)]
    return [state] if isinstance(state, Tensor) else []


def load_and_go_on(name: str, stage: int, folder: str) -> dict[str, Tensor]:
    engine = start(name, stage)
    path, _ = engine.load_checkpoint(folder, load_module_strict=False)
    assert path is not None
    zero.take_steps(engine, range(SAVED_AT, STEPS))
    return gather_trainable(engine.module)


CASES = [(stage, name) for stage in (1, 2, 3) for name in ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8")]
QUICK = {(2, "AdamW8bit"), (3, "AdamW"), (3, "AdamW8bit"), (3, "AdamW4bit")}


@pytest.mark.parametrize(
    ("stage", "name"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_resumed_equals_uninterrupted(stage: int, name: str, tmp_path: Path) -> None:
    (end, distance, low), _ = run(2, save_in_the_middle, name, stage, str(tmp_path), timeout=TIMEOUT)
    assert low == (name != "AdamW")
    assert distance < {"AdamW": 1e-5, "AdamW4bit": 0.5}.get(name, 0.1)  # of AdamW's adapter, after five steps
    for resumed in run(2, load_and_go_on, name, stage, str(tmp_path), timeout=TIMEOUT):
        assert error(resumed, end) == 0


def load_elsewhere(folder: str) -> str:
    engine = start("AdamW8bit", 3)
    try:
        engine.load_checkpoint(folder, load_module_strict=False)
    except Exception as error:
        return str(error)
    return ""


def test_another_number_of_ranks_is_deepspeeds_error(tmp_path: Path) -> None:
    """Its stages 1 to 3 load on the number of ranks that saved; `halfbyte train` says so before loading weights."""
    run(2, save_in_the_middle, "AdamW8bit", 3, str(tmp_path), timeout=TIMEOUT)
    assert "world size" in run(1, load_elsewhere, str(tmp_path), timeout=TIMEOUT)[0].lower()


def train_in_full(stage: int) -> float:
    """A dense model whose every parameter is trained with 8-bit states; distance from one process after three steps."""
    case = Case(packed=False)
    model, alone = make(case, dist.get_rank()).requires_grad_(True), make(case).requires_grad_(True)
    optimizer = make_low_bit(list(alone.parameters()))
    config = zero.config(stage) | {"gradient_clipping": 0.0}  # DeepSpeed's default is 1.0
    engine = zero.initialize(model, prepare_for_deepspeed(model, config), make_low_bit)
    zero.take_steps(engine, range(3))
    for step in range(3):
        for part in range(2):
            forward_backward(case, alone, step, part, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    found = gather_trainable(engine.module)
    return max((found[n] - e).abs().max().item() for n, e in expected.items())


def make_low_bit(parameters: list) -> torch.optim.Optimizer:
    """Blocks of 8 divide every partition here. The gradient of a key's bias is mere rounding, which eps keeps small."""
    return halfbyte.optim.AdamW8bit(parameters, lr=1e-2, eps=1e-5, min_quant_numel=0, block_size=8)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_full_precision_parameters(stage: int) -> None:
    """Three steps of at most about lr each: a state that was cut elsewhere or lost would differ by that much."""
    for distance in run(2, train_in_full, stage, timeout=TIMEOUT):
        assert distance < 1e-3
