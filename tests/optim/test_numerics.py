"""What 8 and 4 bits do to an update: bounded, free of scale, no worse than torchao's, and one bad element stays alone.

fp32 AdamW (unquantized states of our own step, which test_step_ref holds against torch) is the yardstick.
"""

from collections.abc import Iterator
from pathlib import Path
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


@pytest.mark.parametrize("name", FORMATS)
def test_a_million_states_are_bounded_in_the_next_step(name: str) -> None:
    """2a over the codes: random live states (10^6 blocks of 8), quantized, then stepped without a gradient.

    A moment is m = c sqrt(v), |c| <= 1, as Adam's own are to within its bias correction; what the codes make of it
    must not move further than three times what fp32 does with the same moments, or three lr.
    """
    fmt = FORMATS[name].with_block_size(8)
    generator = torch.Generator().manual_seed(2)
    numel = 8 * 10**6
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


@pytest.mark.parametrize("exponent", [0, -5, -6, -7, -8, -9, -10, -11, -12])
@pytest.mark.parametrize("cls", ADAMW)
def test_a_constant_gradient_moves_one_lr_a_step(cls: type, exponent: int) -> None:
    """2b and o17: 20 steps of 10^exponent with eps 1e-15 move 20 lr, within 5%. Neighbours of another magnitude (half
    to one and a half) are rounded, so the mean is held to 5%, or 15% for 4 bits."""
    for spread, tolerance in ((0.0, 0.05), (1.0, 0.15 if cls is ADAMW[1] else 0.05)):
        param = nn.Parameter(torch.zeros(5000))
        optimizer = cls([param], lr=LR, eps=1e-15, weight_decay=0.0)
        grad = 10.0**exponent * (1 + spread * (torch.rand(5000, generator=torch.Generator().manual_seed(0)) - 0.5))
        for _ in range(20):
            param.grad = grad.clone()
            optimizer.step()
        assert -param.mean().item() == pytest.approx(20 * LR, rel=tolerance)


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


@pytest.mark.parametrize("name", FORMATS)
def test_one_shot_error_is_torchaos(name: str) -> None:
    """2c: RMS error of Gaussian exp_avg and chi-square exp_avg_sq (as its root), in units of their own RMS; torchao
    measures 0.0108 / 0.0047, 0.0261 / 0.0130 and 0.149 / 0.313 on such data. Same codes, so at most 3% above it."""
    limits = {"8bit": (0.0108, 0.0047), "fp8": (0.0261, 0.0130), "4bit": (0.149, 0.313)}[name]
    fmt, generator = FORMATS[name], torch.Generator().manual_seed(0)
    exp_avg = torch.randn(2**18, generator=generator)
    exp_avg_sq = torch.randn(2**18, generator=generator).square()
    m = dequantize(*quantize(exp_avg, fmt, signed=True), fmt, 2**18, signed=True)
    v = dequantize(*quantize(exp_avg_sq, fmt, signed=False), fmt, 2**18, signed=False)
    assert (m - exp_avg).square().mean().sqrt() <= 1.03 * limits[0]
    assert (v.sqrt() - exp_avg_sq.sqrt()).square().mean().sqrt() <= 1.03 * limits[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", ADAMW)
def test_distance_from_fp32_is_at_most_torchaos(cls: type) -> None:
    """2c: 200 steps of noise, and of a small network; distance of all weights from fp32 AdamW's run on the same
    gradients. Same codes and better rules: at most torchao's, plus 2% for ties broken otherwise."""
    ao = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")
    try:
        for problem in (noise_problem, network_problem):
            exact = problem(torch.optim.AdamW)
            ours, theirs = problem(cls), problem(getattr(ao, cls.__name__))
            assert (ours - exact).norm() <= 1.02 * (theirs - exact).norm()
    finally:
        torch.compiler.set_stance("default")


def noise_problem(cls: type) -> Tensor:
    param = nn.Parameter(torch.zeros(64, 128))
    optimizer = cls([param], lr=LR)
    generator = torch.Generator().manual_seed(0)
    magnitude = 10 ** (-2 * torch.rand(64, 128, generator=generator))
    for _ in range(200):
        param.grad = torch.randn(64, 128, generator=generator) * magnitude
        optimizer.step()
    return param.detach()


def network_problem(cls: type) -> Tensor:
    """A classifier of bytes by their neighbours in a real text: this file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 64), nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128))
    optimizer = cls(model.parameters(), lr=LR)
    text = torch.tensor([min(byte, 127) for byte in Path(__file__).read_bytes()])
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        at = torch.randint(0, len(text) - 5, (32,), generator=generator)
        context = torch.stack([text[at + i] for i in range(4)], 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(context), text[at + 4]).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in model.parameters()])
