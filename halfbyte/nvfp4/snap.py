"""Moving a frozen weight by a small change, in place on its grid: the codes move, the block scales stay.

In code space, all in fp32: v = value(code) + delta / (scale * global_scale), its place on the line of codes (see
numerics/e2m1.py) is p, and the new code is the lower neighbour of p, or the upper one when the share above the lower
is larger than the element's threshold. A zero delta leaves p an integer, so the byte is the base's, whatever quantizer
chose it; -0 keeps its sign bit too. Values beyond 6 saturate: raising the scale of every block that passes 6 was
measured and is ruinous, since two blocks in three do (13.8% noise against 2.5%).

Source of the idea: dithered quantization (Roberts 1962; Schuchman 1964), with a threshold that never changes.
"""

import torch
from torch import Tensor

from halfbyte.numerics.e2m1 import E2M1_MAX, decode
from halfbyte.numerics.packing import pack_nibbles, unpack_nibbles
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts

LARGEST = torch.finfo(torch.float32).max


def snap(parts: NVFP4Parts, delta: Tensor, threshold: Tensor | None) -> Tensor:
    """Codes of base + delta on the base's own scales.

    parts      the base, [N, K].
    delta      fp32 [N, K], the change in the weight's units.
    threshold  fp32 [N, K] in (0, 1), or None to round to the nearest code, ties to the even one.
    returns    qdata, uint8 [N, K/2].
    """
    base_codes = unpack_nibbles(parts.qdata)
    moved = decode(base_codes) + (delta.unflatten(-1, (-1, BLOCK_SIZE)) * step_inv(parts).unsqueeze(-1)).flatten(-2)
    position = signed_position(moved)
    lower = position.floor()
    if threshold is None:
        new = position.round()
    else:
        new = lower + (position - lower > threshold)
    magnitude = new.abs().to(torch.uint8)
    negative = torch.where(magnitude == 0, base_codes >> 3, (new < 0).to(torch.uint8))
    return pack_nibbles(magnitude | (negative << 3))


def step_inv(parts: NVFP4Parts) -> Tensor:
    """1 / (scale * global_scale), fp32 [N, K/16], finite; zero where the scale is zero, for there nothing can move."""
    step = parts.scale.float() * parts.global_scale
    return torch.where(step > 0, (1 / step).clamp_(max=LARGEST), 0.0)


def signed_position(v: Tensor) -> Tensor:
    """Place of a value on the line of codes, -7 to 7; grid values fall on integers, and 6 and beyond on 7."""
    magnitude = v.abs().clamp_(max=E2M1_MAX)
    return torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4).copysign_(v)
