"""A LoRA layer over a frozen NVFP4 weight as one autograd function.

    t = drop(x) A^T          [M, r]
    y = x W^T + bias + s t B^T
    u = s g B                [M, r]
    dx = g W + drop'(u A),   dA = u^T drop(x),   dB = s g^T t

PEFT's forward makes five functions of it: it keeps x twice when the factors are fp32 and x is not (a cast copy), and
passes four times more over the [M, N] output. Here x and t are kept (and the mask, one byte a value, where there is
dropout); the adapter's part is written first and the large product added to it, which costs least: a large product
waits for arithmetic and reads what it adds to meanwhile. Whatever has M rows stays in x's dtype, and the factors,
small, are cast to it. The gradients of fp32 factors come out of the product in fp32.

Accuracy: with x in bf16, the factors enter as bf16, as they do under autocast; in fp32 nothing is rounded.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.nvfp4.dequantize import decode
from halfbyte.nvfp4.frozen_product import frozen_product, is_few
from halfbyte.nvfp4.matmul import autocast_dtype


class LoraMatmul(torch.autograd.Function):
    """(x [M, K], lora_A [r, K], lora_B [N, r], qdata, scale, global_scale, bias, scaling, dropout p) -> y [M, N].

    Parameters are saved as they came in: engines that move their storage refill the tensors that backward reads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        lora_A: Tensor,
        lora_B: Tensor,
        qdata: Tensor,
        scale: Tensor,
        global_scale: Tensor,
        bias: Tensor | None,
        scaling: float,
        p: float,
    ) -> Tensor:
        dropped, mask = (x, None) if p == 0 else torch.native_dropout(x, p, True)
        t = dropped @ lora_A.to(x.dtype).T
        scaled_B = (lora_B * scaling).to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if is_few(x):
            y = frozen_product(x, qdata, scale, global_scale, bias).addmm_(t, scaled_B.T)
        else:
            y = t @ scaled_B.T if bias is None else torch.addmm(bias, t, scaled_B.T)
            y.addmm_(x, decode(qdata, scale, global_scale, x.dtype).T)
        ctx.save_for_backward(x, t, mask, lora_A, lora_B, qdata, scale, global_scale)
        ctx.scaling, ctx.p = scaling, p
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x, t, mask, lora_A, lora_B, *components = ctx.saved_tensors
        needs_x, needs_A, needs_B = ctx.needs_input_grad[:3]
        grad_x = grad_A = grad_B = None
        if needs_B:
            grad_B = product(g.T, t, lora_B.dtype).mul_(ctx.scaling)
        if needs_A or needs_x:
            u = g @ (lora_B * ctx.scaling).to(g.dtype)
        if needs_A:
            dropped = x if mask is None else drop(x, mask, ctx.p)
            grad_A = product(u.T, dropped, lora_A.dtype)
        if needs_x:
            grad_x = u @ lora_A.to(g.dtype)
            grad_x = grad_x if mask is None else drop(grad_x, mask, ctx.p)
            grad_x.addmm_(g, decode(*components, g.dtype))
        return grad_x, grad_A, grad_B, None, None, None, None, None, None


def drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """x where the mask is set, scaled up to keep its mean; else 0."""
    return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p) if p < 1 else 0.0)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in dtype: from half precision to fp32 without a rounding in between where the library can (CUDA)."""
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def lora_linear(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    components: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    *,
    scaling: float,
    p: float = 0.0,
) -> Tensor:
    """x W^T + bias + scaling * drop(x) A^T B^T, x [..., K] -> [..., N] in x's dtype.

    components  qdata, scale and global_scale as an NVFP4Linear holds them (uint8).
    p           probability of dropout on the adapter's branch.
    Under autocast the products run in autocast's dtype, and the result comes back in x's.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            return lora_linear(x.to(dtype), lora_A, lora_B, components, bias, scaling=scaling, p=p).to(x.dtype)
    y = LoraMatmul.apply(x.reshape(-1, x.shape[-1]), lora_A, lora_B, *components, bias, scaling, p)
    return y.view(*x.shape[:-1], y.shape[-1])
