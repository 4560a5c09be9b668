"""How much of an adapter's change survived the rounding to 4 bits.

With D the change that was wanted and R the one that was got (merged minus base, decoded), R splits into a part along D
and the rest. `kept` is the length of the first in units of D: 1 means that on average the change arrived, 0 that it was
rounded away. `noise` is the length of the rest in the same units: it is what dithering pays, random and small in the
layer's output. A layer that no adapter touches counts as kept.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.lora.snap_adapter import delta_chunks
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import NVFP4Parts


@dataclass(frozen=True)
class Retention:
    """Sums over a weight's elements, which add up over weights: wanted D, got R, base W."""

    wanted_squared: float = 0.0  # <D, D>
    along: float = 0.0  # <R, D>
    got_squared: float = 0.0  # <R, R>
    base_squared: float = 0.0  # <W, W>

    @property
    def kept(self) -> float:
        """Share of the wanted change that was got; 1 where none was wanted."""
        return self.along / self.wanted_squared if self.wanted_squared else 1.0

    @property
    def noise(self) -> float:
        """Length of what was got beside the wanted direction, relative to the wanted change; 0 where none was."""
        if not self.wanted_squared:
            return 0.0
        beside = self.got_squared - self.along**2 / self.wanted_squared
        return math.sqrt(max(beside, 0.0) / self.wanted_squared)

    @property
    def delta_norm(self) -> float:
        """Length of the wanted change."""
        return math.sqrt(self.wanted_squared)

    @property
    def relative_delta(self) -> float:
        """Length of the wanted change relative to the base weight's."""
        return math.sqrt(self.wanted_squared / self.base_squared) if self.base_squared else 0.0

    def __add__(self, other: "Retention") -> "Retention":
        return Retention(
            self.wanted_squared + other.wanted_squared,
            self.along + other.along,
            self.got_squared + other.got_squared,
            self.base_squared + other.base_squared,
        )


def total(layers: Iterable[Retention]) -> Retention:
    """The model's retention: layers weigh by the square of their change."""
    return sum(layers, Retention())


@torch.no_grad()
def retention(base: NVFP4Parts, merged: NVFP4Parts, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Retention:
    """Measure one weight, a chunk of rows at a time."""
    result = Retention()
    for rows, wanted in delta_chunks(lora_A, lora_B, scaling):
        before = dequantize(NVFP4Parts(base.qdata[rows], base.scale[rows], base.global_scale))
        after = dequantize(NVFP4Parts(merged.qdata[rows], merged.scale[rows], merged.global_scale))
        result += measure(wanted, after - before, before)
    return result


def measure(wanted: Tensor, got: Tensor, base: Tensor) -> Retention:
    """The four sums over one piece, in fp64."""
    wanted, got, base = wanted.double(), got.double(), base.double()
    return Retention(
        wanted.square().sum().item(), (got * wanted).sum().item(), got.square().sum().item(), base.square().sum().item()
    )
