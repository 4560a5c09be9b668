"""Formats that are not (yet) ours, for optim_quality.py: fp32 AdamW whose moments are rounded to codes after each step.

A codec here quantizes and dequantizes in plain torch, so a variant is one line: which moment, which map, which block
size, on v or on sqrt(v), rounded to nearest or stochastically, and whether the embeddings are left out. What an arm
shows is the price of the format alone; the shipped optimizers are compared by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.optim.formats import SCALE_MIN, codebook


def code_values(name: str, signed: bool) -> Tensor:
    """Ascending values of a map, at most 1: 8bit, 4bit, fp8; "log N D": N codes over D decades; "even N": k / N;
    "power P": 16 signed codes, (k / 8)^P and -(k / 7)^P."""
    if name == "fp8":
        positive = codebook("fp8", True)[:127] / 448
        return torch.cat([-positive.flip(0)[:-1], positive]) if signed else positive
    if name.startswith("log "):
        _, num, decades = name.split()
        return torch.logspace(-float(decades), 0, int(num))
    if name.startswith("even "):
        num = int(name.split()[1])
        return torch.arange(1, num + 1) / num
    if name.startswith("power "):
        power = float(name.split()[1])
        return torch.cat([-((torch.arange(7, 0, -1) / 7) ** power), (torch.arange(9) / 8) ** power])
    return codebook(name, signed)


@dataclass(frozen=True)
class Codec:
    """One way to round a moment.

    name        of the map, see `code_values`.
    block_size  values that share a scale.
    rounding    "nearest", "stochastic" or "dither" (one threshold a block and step, evenly spread).
    root        which root is stored: 1 the value, 2 its square root, 4 (second moment only).
    nonzero     rule 1: a positive second moment never gets the zero code.
    """

    name: str
    block_size: int = 256
    rounding: str = "nearest"
    root: int = 1
    nonzero: bool = True

    def roundtrip(self, x: Tensor, values: Tensor, step: Tensor, *, signed: bool) -> Tensor:
        """x [n], n divisible by the block size -> what is left of it."""
        blocks = (x if self.root == 1 else x ** (1 / self.root)).view(-1, self.block_size)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=SCALE_MIN)
        y = blocks / scale
        upper = torch.bucketize(y, values, out_int32=True).clamp(1, values.numel() - 1)
        low, high = values[upper - 1], values[upper]
        result = torch.where((y - low) / (high - low) >= self._threshold(y, step), high, low)
        if not signed and self.nonzero and values[0] == 0:
            result = torch.where((y > 0) & (result == 0), high, result)
        result = (result * scale).view(-1)
        return result**self.root

    def _threshold(self, y: Tensor, step: Tensor) -> Tensor | float:
        if self.rounding == "nearest":
            return 0.5
        if self.rounding == "stochastic":
            return torch.rand_like(y).clamp(min=1e-7)
        row = torch.arange(y.shape[0], device=y.device, dtype=torch.float64)[:, None]
        return (row * 0.7548776662466927 + step.double() * 0.6180339887498949).remainder(1.0).float()


@dataclass(frozen=True)
class Arm:
    """Codecs of the two moments (None: fp32).

    skip_embeddings  their moments stay fp32.
    carry            what rounding takes from the first moment is added to the parameter's move, times this; at
                     beta1 / (1 - beta1) = 9 the moves add up to what they would be without rounding.
    """

    exp_avg: Codec | None
    exp_avg_sq: Codec | None
    skip_embeddings: bool = False
    carry: float = 0.0
