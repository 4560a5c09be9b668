"""The tensor-wide scale: as small as lets the largest block scale be 448, and with a reciprocal that comes back.

compressed-tensors stores 1/global_scale, and 1/(1/x) differs from x for about one fp32 in six. When we choose the scale
we are free to take a neighbour that survives (a few ULPs up, so that no block scale passes 448).
"""

import torch
from torch import Tensor

from halfbyte.numerics.e2m1 import E2M1_MAX
from halfbyte.nvfp4.format import E4M3_MAX

# Four-Over-Six (arXiv 2512.02010) multiplies some block scales by 1.5; it leaves room by aiming at 256.
LARGEST_BLOCK_SCALE = {"max": E4M3_MAX, "four-over-six": 256.0}
SMALLEST = 2.0**-120  # below, (1/global_scale) / 2^-6 overflows, and torchao's quantizer turns zeros into NaN
MAX_STEPS = 64  # measured: runs of scales whose reciprocal does not return are far shorter


def global_scale_for(amax: Tensor, *, scales: str = "max") -> Tensor:
    """Tensor scale for a weight whose largest magnitude is amax; of a group of weights, pass the group's.

    amax     [] any float dtype, finite, >= 0. Zero gives 1.0 (a weight of zeros needs no scale).
    scales   "max" or "four-over-six", as in `quantize`.
    returns  fp32 [], the smallest s >= amax / 2688 (1536 for four-over-six) up to a few ULPs with 1/(1/s) == s.
    raises   ValueError for a negative, NaN or infinite amax.
    """
    amax = amax.detach().float().reshape(())
    if not 0 <= amax.item() < float("inf"):
        raise ValueError(
            f"the largest magnitude of a weight must be finite and >= 0, got {amax.item()}; pass weight.abs().max(), "
            "and repair a weight that holds NaN or infinite values"
        )
    if amax.item() == 0:
        return torch.ones_like(amax)
    scale = (amax / (LARGEST_BLOCK_SCALE[scales] * E2M1_MAX)).clamp(min=SMALLEST)
    infinity = torch.full_like(scale, torch.inf)
    for _ in range(MAX_STEPS):
        if torch.equal(1 / (1 / scale), scale):
            return scale
        scale = torch.nextafter(scale, infinity)
    raise AssertionError(f"no scale with a reciprocal that returns within {MAX_STEPS} ULPs of {scale.item()}")
