"""The tensor scale: near amax/2688, never below it, and with a reciprocal that comes back."""

import pytest
import torch

from halfbyte.nvfp4 import global_scale_for


def test_reciprocal_returns_and_nothing_saturates() -> None:
    """Over many magnitudes: 1/(1/s) == s, and the largest block scale, amax/6/s, is at most 448 and close to it."""
    generator = torch.Generator().manual_seed(0)
    moved = 0
    for exponent in range(-30, 30):
        for _ in range(20):
            amax = (torch.rand((), generator=generator) + 0.5) * 10.0**exponent
            scale = global_scale_for(amax)
            assert 1 / (1 / scale) == scale and scale.dtype == torch.float32 and scale.dim() == 0
            largest = (amax / 6 / scale).item()
            assert 448 * (1 - 1e-5) < largest <= 448 * (1 + 2**-23)
            moved += int(scale != amax / 2688)
    assert moved > 50  # about one fp32 in six does not come back by itself


def test_ends() -> None:
    assert global_scale_for(torch.tensor(0.0)) == 1
    for amax in (1e-45, 1e-40, 1e-35, torch.finfo(torch.float32).max):
        scale = global_scale_for(torch.tensor(amax))
        assert torch.isfinite(scale) and torch.isfinite(1 / scale) and 1 / (1 / scale) == scale
    assert global_scale_for(torch.tensor(3.0, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0])
def test_refused(amax: float) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        global_scale_for(torch.tensor(amax))
