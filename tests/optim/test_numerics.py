"""What 8 and 4 bits do to an update: bounded, free of scale, and one bad element stays alone.

fp32 AdamW (unquantized states of our own step, which test_step_ref holds against torch) is the yardstick.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels import step_ref
from halfbyte.optim.state_ops import dequantize, quantize
from tests.optim.training import ADAMW

LR = 1e-3


def run_both(grads: Iterator[Tensor], numel: int, fmt: StateFormat, **options: Any) -> tuple[Tensor, float, float]:
    """Step a zero parameter in the format and in fp32: (difference / lr, our largest move / lr, fp32's)."""
    hyper = Hyper(LR, 0.9, 0.999, **{"eps": 1e-8, "weight_decay": 0.0, **options})
    ours, exact = torch.zeros(numel), torch.zeros(numel)
    state = {"step": torch.zeros(())}
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros(fmt.num_bytes(numel), dtype=torch.uint8)
        state[name + "_scale"] = torch.zeros(fmt.num_blocks(numel))
    fp32 = {"step": torch.zeros(()), "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    largest = [0.0, 0.0]
    for grad in grads:
        for i, (param, own) in enumerate(((ours, state), (exact, fp32))):
            before = param.clone()
            step_ref.step([param], [grad], [own], hyper, fmt)
            largest[i] = max(largest[i], float((param - before).abs().max()) / LR)
    return (ours - exact) / LR, largest[0], largest[1]


def heavy_tail(numel: int, block: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Magnitudes from 10^0 to 10^-6 in every block, each element keeping its own."""
    magnitude = 10 ** (-6 * torch.rand(numel, generator=generator))
    while True:
        yield torch.randn(numel, generator=generator) * magnitude


def wandering_tail(numel: int, block: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Magnitudes drawn anew every step."""
    while True:
        yield torch.randn(numel, generator=generator) * 10 ** (-6 * torch.rand(numel, generator=generator))


def sparse(numel: int, block: int, generator: torch.Generator) -> Iterator[Tensor]:
    """5% of the elements have a gradient."""
    while True:
        yield torch.randn(numel, generator=generator) * (torch.rand(numel, generator=generator) < 0.05)


def large_neighbour(numel: int, block: int, generator: torch.Generator) -> Iterator[Tensor]:
    """One element in a block is 10^4 times the others."""
    factor = torch.full((numel,), 1e-4)
    factor[::block] = 1.0
    while True:
        yield torch.randn(numel, generator=generator) * factor


def stopping(numel: int, block: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Small gradients beside a live large one become exactly zero, each at its own step."""
    magnitude = 10 ** (-6 * torch.rand(numel, generator=generator))
    magnitude[::block] = 1.0
    last = torch.randint(1, 8, (numel,), generator=generator)
    last[::block] = 10**9
    step = 0
    while True:
        yield torch.randn(numel, generator=generator) * magnitude * (step < last)
        step += 1


def take(grads: Iterator[Tensor], steps: int) -> Iterator[Tensor]:
    return (next(grads) for _ in range(steps))


KINDS = [heavy_tail, wandering_tail, sparse, large_neighbour, stopping]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_updates_are_bounded(name: str, kind: Any) -> None:
    """2a and o16, at the formats' own block sizes: 2,000 blocks, 20 steps, never above 3 max(u, lr)."""
    fmt = FORMATS[name]
    numel = 2000 * fmt.block_size
    grads = kind(numel, fmt.block_size, torch.Generator().manual_seed(0))
    _, ours, exact = run_both(take(grads, 20), numel, fmt)
    assert ours <= 3 * max(exact, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_updates_are_bounded_in_a_million_blocks(name: str, kind: Any) -> None:
    """The same over 10^6 blocks, of 16 values so that it ends; a block's scale only sees its own values."""
    fmt = FORMATS[name].with_block_size(16)
    numel = 16 * 10**6
    grads = kind(numel, 16, torch.Generator().manual_seed(1))
    _, ours, exact = run_both(take(grads, 10), numel, fmt)
    assert ours <= 3 * max(exact, 1.0)


@pytest.mark.parametrize("block_size", [8, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_million_states_are_bounded_in_the_next_step(name: str, block_size: int | None) -> None:
    """2a over the codes: 10^6 blocks of random live states, quantized, then stepped without a gradient; blocks of 8,
    and of the formats' own sizes.

    A moment is m = c sqrt(v), |c| <= 1, as Adam's own are to within its bias correction; what the codes make of it
    must not move further than three times what fp32 does with the same moments, or three lr.
    """
    fmt = FORMATS[name].with_block_size(block_size)
    generator = torch.Generator().manual_seed(2)
    numel = 10**6 // 64 * fmt.block_size
    for _ in range(64):
        exp_avg_sq = 10 ** (-12 * torch.rand(numel, generator=generator))
        exp_avg = exp_avg_sq.sqrt() * (2 * torch.rand(numel, generator=generator) - 1)
        m = dequantize(*quantize(exp_avg, fmt, signed=True), fmt, numel, signed=True)
        v = dequantize(*quantize(exp_avg_sq, fmt, signed=False), fmt, numel, signed=False)
        assert (m.abs() / (v.sqrt() + 1e-8)).max() <= 3.0


@pytest.mark.parametrize("variant", ["one", "heavy tail", "sparse"])
@pytest.mark.parametrize("cls", ADAMW)
def test_a_gradient_that_stops_beside_a_large_one(cls: type, variant: str) -> None:
    """o16: torchao moves such a parameter 4,200 lr and more."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = cls([param], lr=LR, weight_decay=0.0, block_size=256)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        if variant == "one":
            grad = torch.zeros(4096)
            grad[::256] = 1.0
            grad[1::256] = 1e-4 if step == 0 else 0.0
        elif variant == "heavy tail":
            grad = torch.randn(4096, generator=generator) * 10 ** (-6 * torch.rand(4096, generator=generator))
        else:
            grad = torch.randn(4096, generator=generator) * (torch.rand(4096, generator=generator) < 0.05)
        before = param.detach().clone()
        param.grad = grad
        optimizer.step()
        assert (param - before).abs().max() <= 3 * LR


@pytest.mark.parametrize("exponent", range(0, -13, -1))
@pytest.mark.parametrize("cls", ADAMW)
def test_a_constant_gradient_moves_one_lr_a_step(cls: type, exponent: int) -> None:
    """2b and o17: 20 steps of 10^exponent with eps 1e-15 move every element 20 lr, within 5% (in fact 0.2%).
    Neighbours of other magnitudes (half to one and a half) are rounded, one by up to 3% (8 bits), 6% (FP8) or 19% (4
    bits), so there the mean is held to 5%, or 15% for 4 bits."""
    for spread, tolerance in ((0.0, 0.05), (1.0, 0.15 if cls is ADAMW[1] else 0.05)):
        param = nn.Parameter(torch.zeros(5000))
        optimizer = cls([param], lr=LR, eps=1e-15, weight_decay=0.0)
        grad = 10.0**exponent * (1 + spread * (torch.rand(5000, generator=torch.Generator().manual_seed(0)) - 0.5))
        for _ in range(20):
            param.grad = grad.clone()
            optimizer.step()
        moved = -param.detach() / (20 * LR)
        assert moved.mean().item() == pytest.approx(1.0, rel=tolerance)
        if not spread:
            assert (moved - 1).abs().max() <= tolerance


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e-25, 1e15, 1e18, 1e30, 3e38])
def test_extreme_gradients_do_what_fp32_does(name: str, value: float) -> None:
    """2b: zeros, denormals, and squares that overflow (torch: m / inf = 0, the parameter stands still). A live
    neighbour in the block goes its own way in all of them: at most one lr a step, never NaN."""
    fmt = FORMATS[name]
    grad = torch.full((300,), value)
    difference, ours, exact = run_both(iter([grad] * 5), 300, fmt)
    assert difference.abs().max() <= 0.01 and ours <= 1.01 * max(exact, 1.0)
    grad = torch.full((300,), 1e-3)
    grad[7] = value
    difference, ours, _ = run_both(iter([grad] * 5), 300, fmt)
    assert difference.isfinite().all() and ours <= 3.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_gradient_element_stays_alone(name: str, poison: float) -> None:
    """2d, o18: that element becomes NaN as in torch and stays so; its block's others are as if it had been zero,
    and everything else is bit for bit as without it."""
    fmt = FORMATS[name]
    hyper = Hyper(LR, 0.9, 0.999, 1e-8, 0.01)
    grad = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    runs = []
    for bad in (0.0, poison):
        param, first = torch.ones(1000), grad.clone()
        first[5] = bad
        state = {"step": torch.zeros(())}
        for name_ in ("exp_avg", "exp_avg_sq"):
            state[name_] = torch.zeros(fmt.num_bytes(1000), dtype=torch.uint8)
            state[name_ + "_scale"] = torch.zeros(fmt.num_blocks(1000))
        for step in range(4):
            step_ref.step([param], [first if step == 1 else grad.clone()], [state], hyper, fmt)
        runs.append(param)
    others = torch.arange(1000) != 5
    assert torch.equal(runs[0][others], runs[1][others])
    assert runs[1][5].isnan()


@pytest.mark.parametrize("where", [5, 4096])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("cls", ADAMW)
def test_what_becomes_nan_is_what_torch_makes_nan(cls: type, poison: float, where: int) -> None:
    """2d with the optimizers themselves, in a whole block and in a tail of one value; 1e30 has an infinite square,
    which stops the element in torch and leaves it finite here."""
    pair = nn.Parameter(torch.ones(4097)), nn.Parameter(torch.ones(4097))
    optimizers = cls([pair[0]], lr=LR), torch.optim.AdamW([pair[1]], lr=LR)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        grad = torch.randn(4097, generator=generator)
        if step == 1:
            grad[where] = poison
        for param, optimizer in zip(pair, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert pair[0].isnan().nonzero().tolist() == pair[1].isnan().nonzero().tolist()
    assert pair[0].isnan().sum() == (poison != 1e30)
