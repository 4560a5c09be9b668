"""out = product * factor, from fp32 to a half type in one pass: 4 bytes read and 2 written a value.

PyTorch's own multiplication into another dtype is not vectorized: 467 us for 8192 x 14336 on an H200, where the bytes
take 165.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 2048
NUM_WARPS = 4


@triton.jit
def scale_kernel(product_ptr, factor_ptr, out_ptr, count, SIZE: tl.constexpr):
    """One program: SIZE values, flattened."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    place = tl.arange(0, SIZE)
    inside = place < tl.minimum(count - start, SIZE).to(tl.int32)
    value = tl.load(product_ptr + start + place, mask=inside, other=0.0) * tl.load(factor_ptr)
    tl.store(out_ptr + start + place, value.to(out_ptr.dtype.element_ty), mask=inside)


def scale_into(out: Tensor, product: Tensor, factor: Tensor) -> Tensor:
    """Fill out (any float dtype) with fp32 product times fp32 factor []; contiguous, of one shape."""
    if product.numel():
        grid = (triton.cdiv(product.numel(), SIZE),)
        scale_kernel[grid](product, factor, out, product.numel(), SIZE=SIZE, num_warps=NUM_WARPS)
    return out


def scale(product: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """product * factor in dtype."""
    return scale_into(torch.empty(product.shape, dtype=dtype, device=product.device), product, factor)
