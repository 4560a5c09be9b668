"""x @ W^T with a frozen NVFP4 weight: one operator that decodes the weight, or on a GPU with few rows does not.

With many rows the library's product over a decoded weight is best: decoding costs a pass over the weight, the memory
comes from the caching allocator and goes back at once. With up to 32 rows (generation of text) kernels that read the
4-bit weight itself, one for one row, for up to 8 and for more, are faster than the two together (measured on an H200,
benchmarks/results).

The choice is made inside the operator, so that torch.compile sees one call and sets no guard on the number of rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.nvfp4.dequantize import decode_reference
from halfbyte.nvfp4.format import bytes_to_float
from halfbyte.nvfp4.kernels.available import has_triton

SMALL_ROWS = 32


def is_few(x_MK: Tensor) -> bool:
    """Whether a kernel reads the 4-bit weight itself for these rows, instead of a library a decoded one."""
    return x_MK.is_cuda and x_MK.dtype in (torch.bfloat16, torch.float16) and 0 < x_MK.shape[0] <= SMALL_ROWS


@torch.library.custom_op("halfbyte::nvfp4_product", mutates_args=())
def frozen_product(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] @ W^T + bias -> [..., N] in x's dtype.

    qdata, scale, global_scale  as an NVFP4Linear holds them: uint8 [N, K/2], [N, K/16] and [4].
    bias                        [N] in x's dtype, or None.
    No gradient: see matmul.py.
    """
    return F.linear(x, decode_reference(qdata, scale, global_scale, x.dtype), bias)


@frozen_product.register_kernel("cuda")
def _(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    if not has_triton():
        return F.linear(x, decode_reference(qdata, scale, global_scale, x.dtype), bias)
    from halfbyte.nvfp4.kernels.dequantize_triton import dequantize
    from halfbyte.nvfp4.kernels.few_rows_triton import MAX_ROWS, few_rows
    from halfbyte.nvfp4.kernels.matvec_triton import matvec
    from halfbyte.nvfp4.kernels.small_matmul_triton import small_matmul

    tensor_scale = bytes_to_float(global_scale)
    x_MK = x.reshape(-1, x.shape[-1])
    if not is_few(x_MK):
        return F.linear(x, dequantize(qdata, scale, tensor_scale, x.dtype), bias)
    kernel = matvec if x_MK.shape[0] == 1 else few_rows if x_MK.shape[0] <= MAX_ROWS else small_matmul
    return kernel(x_MK, qdata, scale, tensor_scale, bias).view(*x.shape[:-1], -1)


@frozen_product.register_fake
def _(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], qdata.shape[0])
