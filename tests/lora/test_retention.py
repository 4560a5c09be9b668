"""What the statistics mean, on changes whose outcome is known."""

import math

import pytest
import torch

from halfbyte.lora import Retention, merged_parts, retention
from halfbyte.lora.retention import measure, total
from halfbyte.nvfp4 import dequantize, quantize


def test_kept_and_noise_of_known_changes() -> None:
    wanted, base = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.full((2, 2), 10.0)
    half = measure(wanted, wanted / 2, base)
    assert (half.kept, half.noise, half.delta_norm) == (0.5, 0.0, math.sqrt(2))
    assert half.relative_delta == pytest.approx(math.sqrt(2) / 20)
    beside = measure(wanted, wanted + torch.tensor([[0.0, 3.0], [0.0, 0.0]]), base)
    assert beside.kept == 1 and beside.noise == pytest.approx(3 / math.sqrt(2))


def test_an_untouched_layer_counts_as_kept() -> None:
    untouched = measure(torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2))
    assert (untouched.kept, untouched.noise, untouched.relative_delta) == (1.0, 0.0, 0.0)
    assert Retention().kept == 1 and total([]).kept == 1


def test_the_total_weighs_by_the_change() -> None:
    wanted, base = torch.ones(2, 2), torch.ones(2, 2)
    layers = [measure(wanted * 3, wanted * 3, base), measure(wanted, wanted * 0, base)]
    assert total(layers).kept == pytest.approx(0.9)


def test_of_a_merge_over_chunks() -> None:
    """Against the definition on the whole matrices, for a weight of several chunks."""
    generator = torch.Generator().manual_seed(0)
    base = quantize(torch.randn(3000, 160, generator=generator))
    lora_A, lora_B = torch.randn(4, 160, generator=generator) * 0.1, torch.randn(3000, 4, generator=generator) * 0.1
    merged = merged_parts(base, lora_A, lora_B, 2.0, name="w")
    wanted = 2.0 * lora_B.double() @ lora_A.double()
    got = dequantize(merged).double() - dequantize(base).double()
    kept = ((got * wanted).sum() / wanted.square().sum()).item()
    noise = ((got - kept * wanted).norm() / wanted.norm()).item()
    found = retention(base, merged, lora_A, lora_B, 2.0)
    assert found.kept == pytest.approx(kept, rel=1e-6) and found.noise == pytest.approx(noise, rel=1e-6)
