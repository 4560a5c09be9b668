"""E2M1 against torchao, and against a search over the sixteen values."""

import pytest
import torch

from halfbyte.numerics.e2m1 import E2M1_MAGNITUDES, E2M1_VALUES, decode, encode

MIDPOINTS = [(a + b) / 2 for a, b in zip(E2M1_MAGNITUDES, E2M1_MAGNITUDES[1:], strict=False)]


def interesting_values() -> torch.Tensor:
    """Grid values and ties with their fp32 neighbours, zeros, tiny and huge values, and random ones; both signs."""
    exact = torch.tensor([*E2M1_MAGNITUDES, *MIDPOINTS, 1e-45, 1e-38, 1e30, float("inf")])
    around = [exact, torch.nextafter(exact, torch.tensor(torch.inf)), torch.nextafter(exact, torch.tensor(0.0))]
    values = torch.cat([*around, torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 7])
    return torch.cat([values, -values])


def test_codes_equal_torchao_bit_for_bit() -> None:
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    values = interesting_values()
    assert torch.equal(encode(values), kernels.f32_to_f4_unpacked(values))


def test_the_nearest_value_is_chosen() -> None:
    values = interesting_values().clamp(-6, 6).double()
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    best = (values.unsqueeze(-1) - table).abs().amin(-1)
    assert torch.equal((values - decode(encode(values.float())).double()).abs(), best)


def test_ties_go_to_the_even_code_and_signs_stay() -> None:
    assert encode(torch.tensor(MIDPOINTS)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(torch.tensor([-0.0, -0.1, -7.0])).tolist() == [8, 8, 15]


def test_all_codes_come_back_in_every_dtype() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(encode(decode(codes, dtype).float()), codes)
