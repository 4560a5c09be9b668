"""State formats: how Adam's two moments are written in 8 or 4 bits.

A moment is cut into blocks of `block_size` consecutive values of the flattened local tensor (the last block may be
shorter); a block has one fp32 scale and each value one code: `value = codebook[code] * scale`. The codebooks are
torchao 0.18's, so that files interchange: "8bit" the dynamic maps of Dettmers et al. (8-bit optimizers, 2021), "4bit"
the dynamic map and the zero-free linear map of Li et al. (4-bit optimizers, 2023), "fp8" E4M3. Two rules are ours,
because without them a step can be thousands of learning rates long, or a twentieth of what it should be:

1. a second moment that is positive never gets a zero code (it would divide the first moment by eps);
2. a scale has no floor but `SCALE_MIN` = 1e-30 (a floor of 1e-12 acts as a hidden eps).

Rejected: a format of our own on the square root of the second moment; see docs/log.md for what it measured.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

SCALE_MIN = 1e-30
"""The least scale. Its reciprocal and its square root are ordinary fp32 numbers; eps 1e-15 is still above its root's
share in the update."""


@dataclass(frozen=True)
class StateFormat:
    """One way to store a moment.

    name        "8bit", "4bit" or "fp8".
    bits        bits of a code; 4-bit codes lie two in a byte, the even element in the high nibble.
    block_size  values that share one fp32 scale.
    code_max    value of the largest code, so scale = amax / code_max.
    """

    name: str
    bits: int
    block_size: int
    code_max: float

    def with_block_size(self, block_size: int | None) -> "StateFormat":
        """The same codes with another block size; None keeps it. Raises ValueError unless it is a positive int."""
        if block_size is None:
            return self
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ValueError(
                f"block_size is {block_size!r}, but it counts the values that share one scale: give a positive "
                f"integer, e.g. the default {FORMATS[self.name].block_size} of {self.name}."
            )
        return self if block_size == self.block_size else replace(self, block_size=block_size)

    @property
    def bytes_per_param(self) -> float:
        """Bytes both moments take for one parameter: 2.03 (8bit, fp8), 1.06 (4bit) at the default block sizes."""
        return 2 * (self.bits / 8 + 4 / self.block_size)

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def num_bytes(self, numel: int) -> int:
        """Bytes of `numel` codes."""
        return numel if self.bits == 8 else -(-numel // 2)


FORMATS = {
    "8bit": StateFormat("8bit", bits=8, block_size=256, code_max=1.0),
    "4bit": StateFormat("4bit", bits=4, block_size=128, code_max=1.0),
    "fp8": StateFormat("fp8", bits=8, block_size=256, code_max=448.0),
}


def _dynamic_map(signed: bool, exponent_bits: int, total_bits: int) -> list[float]:
    """Dettmers' dynamic map, sorted: midpoints of a linear grid on [0.1, 1] in each decade, and 0 and 1."""
    values = [0.0, 1.0]
    for i in range(exponent_bits):
        num_cells = 2 ** (i + total_bits - exponent_bits - (1 if signed else 0))
        edges = torch.linspace(0.1, 1.0, num_cells + 1, dtype=torch.float32, device="cpu")
        # torchao multiplies the fp32 midpoints in fp32; doing the same gives the same bits.
        cells = ((edges[:-1] + edges[1:]) / 2.0 * 10.0 ** (i - exponent_bits + 1)).tolist()
        values += cells
        if signed:
            values += [-value for value in cells]
    return sorted(values)


@lru_cache
def codebook(name: str, signed: bool) -> Tensor:
    """Value of each code, ascending but for fp8: fp32 on the CPU, [256] or [16]. Treat it as read-only.

    signed  True for exp_avg, False for exp_avg_sq and max_exp_avg_sq. fp8 has one table, whose codes 127 and 255 are
            NaN; they are never written.
    """
    if name == "fp8":
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    if name == "4bit" and not signed:
        values = [k / 16 for k in range(1, 17)]
    else:
        values = _dynamic_map(signed, *((7, 8) if name == "8bit" else (3, 4)))
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@lru_cache
def midpoints(name: str, signed: bool) -> Tensor:
    """Where the code changes: y gets code `sum(y >= midpoints)`; fp32 on the CPU, [255] or [15]. Not for fp8.

    Each is the fp64 mean of two neighbouring codes, rounded to fp32; a tie goes to the higher code, as in torchao.
    Rule 1 is not in here: it looks at the second moment itself, since y = value / scale may underflow.
    """
    values = codebook(name, signed).double()
    return ((values[:-1] + values[1:]) / 2).float()


def zero_code(name: str, signed: bool) -> int:
    """The code of 0, or of the least value where the map has no zero (unsigned 4-bit)."""
    return {"8bit": 127, "4bit": 7, "fp8": 0}[name] if signed else 0


def top_code(name: str) -> int:
    """The code of the largest value, `code_max`."""
    return {"8bit": 255, "4bit": 15, "fp8": 126}[name]
