"""NVFP4 to dense, with torchao's order of operations, so that values agree bit for bit.

`code * (global_scale * scale)` in fp32, then rounded once to the dtype asked for. A byte holds two codes, so a table of
256 pairs decodes it in one lookup.
"""

import functools

import torch
from torch import Tensor

from halfbyte.numerics.e2m1 import E2M1_VALUES
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts


def dequantize(parts: NVFP4Parts, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense weight [N, K] in dtype (bf16, fp16 or fp32), on the parts' device."""
    n, k = parts.shape
    codes = pair_table(parts.qdata.device)[parts.qdata.to(torch.int32)]  # [N, K/2, 2]
    scale = parts.global_scale * parts.scale.float()
    return (codes.view(n, k // BLOCK_SIZE, BLOCK_SIZE) * scale.unsqueeze(-1)).view(n, k).to(dtype)


@functools.lru_cache(maxsize=16)
def pair_table(device: torch.device) -> Tensor:
    """fp32 [256, 2]: the values of a byte's low and high code."""
    values = torch.tensor(E2M1_VALUES)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).to(device)
