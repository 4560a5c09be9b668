"""The product with the merged weight, and gradients of the factors at rank r.

    W' = Q(W + s B A)        (lora/merge.py: the bits that the writer writes)
    y  = x @ W'^T            (or Qa(x) @ W'^T where the layer quantizes its input)
    dx = g @ W'
    dB = s g^T (x A^T),  dA = s (g B)^T x

Q is passed straight through, so the weight's gradient is g^T x, and the factors' gradients are its products with A and
B; taken in this order they cost what plain LoRA's do, and no [out, in] gradient ever exists. Where the input is
quantized, x stands for Qa(x), which backward computes again.

Kept until backward: x, the factors, and the packed W' (0.5 bytes a weight) or, to spend no memory, the packed base,
from which backward computes W' again.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.lora.fused_matmul import product as product_in
from halfbyte.lora.merge import Recipe, merge
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.dequantize import decode
from halfbyte.nvfp4.format import NVFP4Parts, bytes_to_float
from halfbyte.nvfp4.matmul import autocast_dtype, product
from halfbyte.nvfp4.quantized_matmul import quantize_activations

Components = tuple[Tensor, Tensor, Tensor]  # qdata, scale, global_scale as uint8, as an NVFP4Linear holds them


class MergeAwareMatmul(torch.autograd.Function):
    """(x [M, K], lora_A, lora_B, components of the base or of W', recipe, ...) -> y [M, N].

    recipe  how to merge, or None when the components are W' already.
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
        scaling: float,
        recipe: Recipe | None,
        activation: ActivationQuant | None,
    ) -> Tensor:
        ctx.save_for_backward(x, lora_A, lora_B, qdata, scale, global_scale)
        ctx.scaling, ctx.recipe, ctx.activation = scaling, recipe, activation
        components = merged_components((qdata, scale, global_scale), lora_A, lora_B, scaling, recipe)
        return product(x, *components, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grads
        x, lora_A, lora_B, *base = ctx.saved_tensors
        needs_x, needs_A, needs_B = ctx.needs_input_grad[:3]
        grad_x = grad_A = grad_B = None
        if needs_A or needs_B:
            operand = x
            if ctx.activation is not None:
                operand = quantize_activations(x, ctx.activation.scale).dequantize(x.dtype)
            if needs_B:
                grad_B = product_in(g.T, operand @ lora_A.to(x.dtype).T, lora_B.dtype).mul_(ctx.scaling)
            if needs_A:
                grad_A = product_in((g @ lora_B.to(g.dtype)).T, operand, lora_A.dtype).mul_(ctx.scaling)
        if needs_x:
            qdata, scale, global_scale = base
            components = merged_components((qdata, scale, global_scale), lora_A, lora_B, ctx.scaling, ctx.recipe)
            grad_x = g @ decode(*components, g.dtype)
        return grad_x, grad_A, grad_B, None, None, None, None, None, None


def merged_components(
    base: Components, lora_A: Tensor, lora_B: Tensor, scaling: float, recipe: Recipe | None
) -> Components:
    """Components of W', uint8; the base's own where there is no recipe."""
    if recipe is None:
        return base
    qdata, scale, global_scale = base
    parts = NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), bytes_to_float(global_scale))
    merged = merge(parts, lora_A, lora_B, scaling, recipe)
    return merged.qdata, merged.scale.view(torch.uint8), global_scale


def merge_aware_linear(
    x: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    components: Components,
    bias: Tensor | None,
    *,
    scaling: float,
    recipe: Recipe | None,
    activation: ActivationQuant | None = None,
) -> Tensor:
    """x W'^T + bias, x [..., K] -> [..., N] in x's dtype. Under autocast the product runs in autocast's dtype."""
    dtype = autocast_dtype(x)
    if dtype is not None:
        with torch.autocast(x.device.type, enabled=False):
            y = merge_aware_linear(
                x.to(dtype), lora_A, lora_B, components, bias, scaling=scaling, recipe=recipe, activation=activation
            )
        return y.to(x.dtype)
    x_MK = x.reshape(-1, x.shape[-1])
    y = MergeAwareMatmul.apply(x_MK, lora_A, lora_B, *components, scaling, recipe, activation)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else y + bias.to(x.dtype)
