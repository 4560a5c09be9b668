"""Is a tensor scale stored in its format's direction? Its reciprocal usually gives itself away.

Formats store a tensor scale or its reciprocal, about 1e-4 or 1e4. Nothing in a file says which, but under the wrong one
the largest weight of a layer is 1e6 times too large, or too small.
"""

import torch
from torch import Tensor

from halfbyte.checkpoint.formats.base import largest_bits

PLAUSIBLE = (1e-4, 1e3)  # largest decoded magnitude of a layer
LARGEST_CODE = 6.0


def largest_weight(scale: Tensor, global_scale: Tensor) -> float:
    """Upper bound of the magnitudes that block scales [N, K/16] (E4M3) and a tensor scale can mean."""
    largest = torch.tensor(largest_bits(scale), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return LARGEST_CODE * float(largest) * float(global_scale)


def implausible(scale: Tensor, global_scale: Tensor) -> str | None:
    """What is suspicious about a layer's scales, to follow its name; None for nothing."""
    largest = largest_weight(scale, global_scale)
    if not largest or PLAUSIBLE[0] < largest < PLAUSIBLE[1]:
        return None
    return f"its largest weight is {largest:.3g}; is the tensor scale stored upside down?"


def summary(found: dict[str, str]) -> str:
    """Name -> what is suspicious, as one line: the first, and how many more."""
    name, what = next(iter(found.items()))
    return f"{name}: {what}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
