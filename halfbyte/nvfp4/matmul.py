"""The product with a frozen NVFP4 weight, and its gradient for x.

    y = x @ W^T,  dx = g @ W,  W = dequantize(parts) in x's dtype

Between forward and backward only the packed components live on: W is decoded again in backward. There is no gradient
for the weight, so x need not be kept either.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.nvfp4.dequantize import decode


class WeightOnlyMatmul(torch.autograd.Function):
    """(x, qdata, scale, global_scale) -> x @ W^T; the components are the module's uint8 parameters.

    They are saved as they came in, not as views: engines that move parameter storage between forward and backward
    (FSDP2, ZeRO-3) then refill the tensors that backward reads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
        ctx.save_for_backward(qdata, scale, global_scale)
        return F.linear(x, decode(qdata, scale, global_scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (grad,) = grads
        return grad @ decode(*ctx.saved_tensors, grad.dtype), None, None, None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Dtype in which the product runs: autocast's where autocast is on, else x's."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def linear(x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x @ W^T + bias, x [..., K] of any leading shape -> [..., N] in x's dtype.

    Under autocast the product runs in autocast's dtype, and the result comes back in x's.
    """
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        y = WeightOnlyMatmul.apply(x.to(dtype), qdata, scale, global_scale)
        if bias is not None:
            y = y + bias.to(dtype)
    return y.to(x.dtype)
