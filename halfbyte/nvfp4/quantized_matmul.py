"""The product with both sides in NVFP4 (W4A4), and its gradient for x.

    y = Qa(x) @ W^T,  dx = g @ W (straight through Qa)

Qa is the weights' quantizer with a tensor scale from the batch (largest magnitude / 2688) or fixed at calibration. A
code (2 significant bits) times a block scale (4) has at most 6, so such matrices are exact in bf16. They are multiplied
with fp32 accumulation (on a CPU as their fp32 copies), and both tensor scales are applied to the fp32 result: what a
Blackwell GEMM computes, up to the order of its sums, on any hardware. Where the GPU has FP4 tensor cores (compute
capability 10.0 and later) `native_product` gives the packed operands to PyTorch's own scaled matmul instead.

NOT RUN: no such GPU was at hand. `native_product` is written from PyTorch's documentation and torchao's use of it;
PyTorch accepts its arguments on the meta device, its arithmetic was never seen.

Where we differ from torchao: its tensor scale of a batch of zeros is 0, and the result NaN; it rounds the product to
bf16 before it applies the scales; it loses the gradient of x.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.nvfp4.dequantize import decode
from halfbyte.nvfp4.format import E4M3_MAX, bytes_to_float, float_to_bytes
from halfbyte.nvfp4.kernels.available import has_triton
from halfbyte.nvfp4.layout import swizzle
from halfbyte.nvfp4.quantize import encode
from halfbyte.nvfp4.scaling import E2M1_MAX, SMALLEST

NATIVE_CAPABILITY = (10, 0)
NATIVE_ALIGNMENT = {"in_features": 32, "out_features": 16}  # 16 bytes a packed row; 16 columns of output


class QuantizedMatmul(torch.autograd.Function):
    """(x, qdata, scale, global_scale, static activation scale or None) -> Qa(x) @ W^T, [..., N] in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, activation_scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(qdata, scale, global_scale)
        return quantized_product(x, qdata, scale, global_scale, activation_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_x = grad @ decode(*ctx.saved_tensors, grad.dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None


class Activations(NamedTuple):
    """A quantized batch: qdata uint8 [M, K/2], scale uint8 [M, K/16], tensor_scale fp32 []."""

    qdata: Tensor
    scale: Tensor
    tensor_scale: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Qa(x), [M, K]."""
        return decode(self.qdata, self.scale, float_to_bytes(self.tensor_scale), dtype)


def quantize_activations(x_MK: Tensor, activation_scale: float | None) -> Activations:
    """A batch [M, K] as NVFP4. No check and no wait for the GPU: a NaN comes out as NaN.

    activation_scale  the tensor scale, or None for the batch's largest magnitude / 2688.
    """
    if activation_scale is not None:
        tensor_scale = torch.full((), activation_scale, dtype=torch.float32, device=x_MK.device)
    elif x_MK.numel() == 0:
        tensor_scale = torch.ones((), device=x_MK.device)
    else:
        low, high = torch.aminmax(x_MK.detach())
        tensor_scale = torch.maximum(-low, high).float() / (E4M3_MAX * E2M1_MAX)
    tensor_scale = tensor_scale.clamp(min=SMALLEST)
    qdata, scale = encode(x_MK.detach(), tensor_scale)
    return Activations(qdata, scale, tensor_scale)


def quantized_product(
    x: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor, activation_scale: float | None
) -> Tensor:
    """Qa(x) @ W^T for x [..., K] -> [..., N] in x's dtype; the weight's components are uint8."""
    batch = quantize_activations(x.reshape(-1, x.shape[-1]), activation_scale)
    if is_native(x.device, 2 * qdata.shape[1], qdata.shape[0]):
        product = native_product(batch, qdata, scale)
    else:
        product = reference_product(batch, qdata, scale)
    y = scaled(product, batch.tensor_scale * bytes_to_float(global_scale), x.dtype)
    return y.view(*x.shape[:-1], qdata.shape[0])


def scaled(product: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """product * factor, in fp32 and rounded once, in one pass. torch.compile makes a kernel of its own."""
    if product.is_cuda and has_triton() and not torch.compiler.is_compiling():
        from halfbyte.nvfp4.kernels.scale_triton import scale

        return scale(product, factor, dtype)
    return torch.mul(product, factor, out=torch.empty(product.shape, dtype=dtype, device=product.device))


def reference_product(batch: Activations, qdata: Tensor, scale: Tensor) -> Tensor:
    """Product of the code-times-block-scale matrices, fp32 [M, N], before the tensor scales."""
    one = float_to_bytes(torch.ones((), device=qdata.device))
    if qdata.is_cuda:
        x_MK, w_NK = (decode(*pair, one, torch.bfloat16) for pair in ((batch.qdata, batch.scale), (qdata, scale)))
        return torch.mm(x_MK, w_NK.T, out_dtype=torch.float32)
    x_MK, w_NK = (decode(*pair, one, torch.float32) for pair in ((batch.qdata, batch.scale), (qdata, scale)))
    return x_MK @ w_NK.T


def native_product(batch: Activations, qdata: Tensor, scale: Tensor) -> Tensor:
    """`reference_product` by the GPU's FP4 tensor cores. Not run, see above."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    fp4 = torch.float4_e2m1fn_x2
    scale_x, scale_w = (swizzle(s.view(torch.float8_e4m3fn)).flatten() for s in (batch.scale, scale))
    return scaled_mm(
        batch.qdata.view(fp4),
        qdata.view(fp4).T,
        scale_x,
        ScalingType.BlockWise1x16,
        scale_w,
        ScalingType.BlockWise1x16,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )


def is_native(device: torch.device, in_features: int, out_features: int) -> bool:
    """True where the FP4 tensor cores can take this product; any number of rows is right."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < NATIVE_CAPABILITY:
        return False
    return in_features % NATIVE_ALIGNMENT["in_features"] == 0 and out_features % NATIVE_ALIGNMENT["out_features"] == 0
