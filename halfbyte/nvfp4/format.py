"""What an NVFP4 weight is: 4-bit codes, one E4M3 scale for 16 neighbours along K, one fp32 scale for the tensor.

    value[n, k] = E2M1(code[n, k]) * scale[n, k // 16] * global_scale

In memory a frozen layer keeps all three as uint8 (`linear.py` says why); `NVFP4Parts` is the same with the types that
the bits mean. Both scales multiply; formats that store reciprocals are converted where files are read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_SIZE = 16
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6


class NVFP4Parts(NamedTuple):
    """One weight [N, K] in 4.5 bits per value, plus 4 bytes.

    qdata         uint8 [N, K/2], even column in the low nibble.
    scale         float8_e4m3fn [N, K/16], row-major (not swizzled).
    global_scale  fp32 [].
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the weight."""
        return self.qdata.shape[0], 2 * self.qdata.shape[1]


def check_in_features(in_features: int, name: str) -> None:
    """ValueError when the columns do not fall into blocks of 16."""
    if in_features % BLOCK_SIZE:
        raise ValueError(
            f"{name}: in_features is {in_features}, but NVFP4 shares a scale among {BLOCK_SIZE} values, so it must be "
            f"divisible by {BLOCK_SIZE}. Leave this layer dense (exclude it from quantization)."
        )


def check_parts(parts: NVFP4Parts, name: str = "weight") -> None:
    """ValueError when dtypes or shapes of the three components do not belong together."""
    n, k = parts.shape
    check_in_features(k, name)
    expected = {
        "qdata": (torch.uint8, (n, k // 2)),
        "scale": (torch.float8_e4m3fn, (n, k // BLOCK_SIZE)),
        "global_scale": (torch.float32, ()),
    }
    for field, (dtype, shape) in expected.items():
        found = getattr(parts, field)
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise ValueError(
                f"{name}: {field} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)} "
                f"beside qdata {list(parts.qdata.shape)}; pass the components of one weight, as quantize makes them"
            )


def row_chunks(n: int, k: int, values: int = 1 << 18) -> list[slice]:
    """Slices over n rows of k columns, about so many values each (at least a row)."""
    step = max(1, values // max(k, 1))
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def float_to_bytes(value: Tensor) -> Tensor:
    """fp32 [] -> its four bytes, uint8 [4]."""
    return value.detach().reshape(1).view(torch.uint8)


def bytes_to_float(raw: Tensor) -> Tensor:
    """uint8 [4] -> fp32 []. A view where alignment allows; engines may hand us a slice of a flat buffer, where not."""
    if torch.compiler.is_compiling() or raw.storage_offset() % 4 or not raw.is_contiguous():
        raw = raw.clone()
    return raw.view(torch.float32).reshape(())
