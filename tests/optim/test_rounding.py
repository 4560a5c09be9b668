"""Stochastic rounding: unbiased, reproducible, and independent of how a tensor is sharded."""

import pytest
import torch
from torch import nn

from halfbyte.optim import AdamW8bit
from halfbyte.optim.rounding import Counter, fmix32, param_seed, random_bits, round_stochastic, step_key

CPU = torch.device("cpu")


def numpy_bits(counter: Counter, step: int, numel: int) -> list[int]:
    """The definition, one element at a time in Python integers."""
    key, multiply = step_key(counter.seed, step)
    result = []
    for i in range(numel):
        index = counter.offset + i // counter.inner * counter.outer + i % counter.inner
        low, high = index & 0xFFFFFFFF, index >> 32
        result.append(fmix32((low * multiply + key + high * 0x85EBCA6B) & 0xFFFFFFFF) & 0xFFFF)
    return result


@pytest.mark.parametrize("offset", [0, 12345, 2**32 - 50, 2**40 + 7])
def test_bits_are_the_definitions(offset: int) -> None:
    counter = Counter(param_seed(3, 5), offset, 10, 37)
    assert random_bits(counter, 9, 0, 100, CPU).tolist() == numpy_bits(counter, 9, 100)


def test_fmix32_is_murmur3s() -> None:
    """Known values of MurmurHash3's finalizer."""
    assert [fmix32(x) for x in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]


@pytest.mark.parametrize("value", [1.001, -0.3333, 1e-3, 123.456, 1e-30])
def test_mean_of_a_million_draws(value: float) -> None:
    """The mean is the value, to five standard errors of a Bernoulli between two bf16 neighbours."""
    x = torch.full((10**6,), value)
    rounded = round_stochastic(x, random_bits(Counter(param_seed(0, 0), 0, 10**6, 10**6), 1, 0, 10**6, CPU))
    low, high = sorted(rounded.unique().double().tolist())
    assert rounded.dtype == torch.bfloat16 and low < value < high
    share = (x[0].double().item() - low) / (high - low)
    error = (high - low) * (share * (1 - share) / 10**6) ** 0.5
    assert abs(rounded.double().mean().item() - x[0].double().item()) <= 5 * error + (high - low) * 2**-16


def test_mean_over_steps() -> None:
    """One element over 4,000 steps is as unbiased as 4,000 elements in one."""
    x = torch.tensor([1.001])
    counter = Counter(param_seed(0, 0), 17, 1, 1)
    draws = [round_stochastic(x, random_bits(counter, step, 0, 1, CPU)).item() for step in range(4000)]
    share = (x.item() - 1.0) / 2**-7
    mean = (sum(draws) / len(draws) - 1.0) / 2**-7
    assert abs(mean - share) <= 5 * (share * (1 - share) / 4000) ** 0.5


def test_bits_are_uniform_and_uncorrelated() -> None:
    """Each of 16 bits is set half of the time (5 sigma of 10^6); neighbours, steps and parameters do not correlate."""
    n = 10**6
    counter = Counter(param_seed(0, 0), 0, n, n)
    first = random_bits(counter, 1, 0, n, CPU)
    for bit in range(16):
        assert abs(((first >> bit) & 1).float().mean().item() - 0.5) < 5 * 0.5 / n**0.5
    others = [
        random_bits(counter, 2, 0, n, CPU),
        random_bits(Counter(param_seed(0, 1), 0, n, n), 1, 0, n, CPU),
        first.roll(1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other]).double())[0, 1].item()) < 5 / n**0.5


def test_special_values_are_cast_plainly() -> None:
    x = torch.tensor([float("nan"), torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    x = torch.cat([x, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    rounded = round_stochastic(x, torch.full((7,), 65535, dtype=torch.int32))
    assert rounded[0].isnan() and rounded[6].isnan()
    assert rounded[1:6].tolist() == [torch.inf, -torch.inf, 0.0, 0.0, 1.0]


def test_small_updates_survive_and_torchs_generator_is_untouched() -> None:
    """Updates of 1e-4 on a weight of 1 are a 39th of a bf16 step: nearest rounding loses all of them, stochastic
    rounding none on average (5 standard errors of 20,000 weights over 100 steps)."""
    before = torch.get_rng_state()
    moved = {}
    for stochastic in (False, True):
        param = nn.Parameter(torch.ones(20000, dtype=torch.bfloat16))
        optimizer = AdamW8bit([param], lr=1e-4, weight_decay=0.0, bf16_stochastic_round=stochastic)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[stochastic] = 1 - param.float().mean().item()
    assert torch.equal(before, torch.get_rng_state())
    assert moved[False] == 0
    assert moved[True] == pytest.approx(1e-2, rel=0.03)


def test_seed_is_kept_in_the_state_dict() -> None:
    params = [nn.Parameter(torch.ones(5000, dtype=torch.bfloat16)) for _ in range(3)]
    optimizers = [
        AdamW8bit([p], bf16_stochastic_round=True, lr=1e-4, seed=s) for p, s in zip(params, (1, 1, 2), strict=True)
    ]
    for param, optimizer in zip(params, optimizers, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(params[0], params[1]) and not torch.equal(params[0], params[2])
    optimizers[2].load_state_dict(optimizers[0].state_dict())
    assert optimizers[2].param_groups[0]["seed"] == 1
