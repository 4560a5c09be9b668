"""The product with a frozen NVFP4 weight, and its gradient for x.

    y = x @ W^T,  dx = g @ W,  W = dequantize(parts) in x's dtype

Between forward and backward only the packed components live on: W is decoded again in backward. There is no gradient
for the weight, so x need not be kept either.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.dequantize import decode
from halfbyte.nvfp4.frozen_product import frozen_product
from halfbyte.nvfp4.quantized_matmul import QuantizedMatmul, quantized_product


class WeightOnlyMatmul(torch.autograd.Function):
    """(x, qdata, scale, global_scale) -> x @ W^T; the components are the module's uint8 parameters.

    They are saved as they came in, not as views: engines that move parameter storage between forward and backward
    (FSDP2, ZeRO-3) then refill the tensors that backward reads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
        ctx.save_for_backward(qdata, scale, global_scale)
        return frozen_product(x, qdata, scale, global_scale, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (grad,) = grads
        return grad @ decode(*ctx.saved_tensors, grad.dtype), None, None, None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast wants products with x, or None where it is off, unknown (meta) or does not apply."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def product(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, activation: ActivationQuant | None
) -> Tensor:
    """x @ W^T in x's dtype, without a graph."""
    if activation is not None:
        return quantized_product(x, qdata, scale, global_scale, activation.scale)
    return frozen_product(x, qdata, scale, global_scale, None)


def linear(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    activation: ActivationQuant | None = None,
) -> Tensor:
    """y = x @ W^T + bias, x [..., K] of any leading shape -> [..., N] in x's dtype.

    activation  None, or how x is quantized before the product (nvfp4/quantized_matmul.py).
    Under autocast the product runs in autocast's dtype, and the result comes back in x's.
    raises      ValueError when x is no floating tensor: in its dtype every product would be cut to an integer.
    """
    if not x.is_floating_point():
        raise ValueError(f"an NVFP4 layer got {x.dtype} of shape {list(x.shape)}, expected a floating dtype; cast it.")
    dtype = autocast_dtype(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.to(dtype), qdata, scale, global_scale, bias, activation).to(x.dtype)
    if activation is None:
        y = WeightOnlyMatmul.apply(x, qdata, scale, global_scale)
    else:
        y = QuantizedMatmul.apply(x, qdata, scale, global_scale, activation.scale)
    return y if bias is None else y + bias.to(x.dtype)
