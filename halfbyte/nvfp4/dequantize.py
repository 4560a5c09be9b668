"""NVFP4 to dense, with torchao's order of operations, so that values agree bit for bit.

`code * (global_scale * scale)` in fp32, then rounded once to the dtype asked for. A byte holds two codes, so on a CPU a
table of 256 pairs of fp32, seen as 256 int64, decodes it in one lookup: 0.28 ns a weight on one core of an EPYC 9004,
where torch's indexing of the pairs takes 3.7 and a matmul of 512 rows 11. A large weight is decoded in chunks of rows,
so that little but the result is allocated.
"""

import torch
from torch import Tensor

from halfbyte.numerics.e2m1 import E2M1_VALUES
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts, bytes_to_float, float_to_bytes, row_chunks
from halfbyte.nvfp4.kernels.available import has_triton

CHUNK_VALUES = 1 << 20
E2M1_PAIRS = torch.tensor([[E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]] for byte in range(256)])
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def dequantize(parts: NVFP4Parts, dtype: torch.dtype = torch.float32) -> Tensor:
    """The dense weight [N, K] in dtype (bf16, fp16 or fp32), on the parts' device."""
    return decode(parts.qdata, parts.scale.view(torch.uint8), float_to_bytes(parts.global_scale), dtype)


@torch.library.custom_op("halfbyte::nvfp4_decode", mutates_args=())
def decode(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize` of the uint8 components: qdata [N, K/2], scale [N, K/16], global_scale [4] -> [N, K]."""
    return decode_reference(qdata, scale, global_scale, dtype)


@decode.register_kernel("cuda")
def _(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    if not has_triton():
        return decode_reference(qdata, scale, global_scale, dtype)
    from halfbyte.nvfp4.kernels.dequantize_triton import dequantize as decode_triton

    return decode_triton(qdata, scale, bytes_to_float(global_scale), dtype)


@decode.register_fake
def _(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return qdata.new_empty(qdata.shape[0], 2 * qdata.shape[1], dtype=dtype)


def decode_reference(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`decode` in plain PyTorch, on any device."""
    n, half_k = qdata.shape
    block_scale = E4M3_VALUES.to(qdata.device) * bytes_to_float(global_scale)
    pairs = E2M1_PAIRS.to(qdata.device)
    chunks = row_chunks(n, 2 * half_k, CHUNK_VALUES)
    if len(chunks) <= 1:
        return decode_rows(qdata, scale, block_scale, pairs).to(dtype)
    out = torch.empty(n, 2 * half_k, dtype=dtype, device=qdata.device)
    for rows in chunks:
        out[rows] = decode_rows(qdata[rows], scale[rows], block_scale, pairs)
    return out


def decode_rows(qdata: Tensor, scale: Tensor, block_scale: Tensor, pairs: Tensor) -> Tensor:
    """fp32 [n, K] from uint8 rows, the table of 256 block scales and the table of 256 pairs."""
    n, half_k = qdata.shape
    values = pairs.view(torch.int64).view(-1).index_select(0, qdata.reshape(-1).to(torch.int32)).view(torch.float32)
    scales = block_scale.index_select(0, scale.reshape(-1).to(torch.int32))
    return values.view(-1, BLOCK_SIZE).mul_(scales.unsqueeze(-1)).view(n, 2 * half_k)
