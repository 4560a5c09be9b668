"""A dense weight to NVFP4, with torchao's rounding, bit for bit when given the same global scale.

Source: torchao 0.18, prototype/mx_formats/nvfp4_tensor.py (`nvfp4_quantize`). In order, all in fp32: block amax / 6,
/ global_scale, clamped to [2^-6, 448], to E4M3; then x * ((1 / global_scale) / scale), clamped to +-6, to the nearest
code. The product with a reciprocal is not a division: an exact tie may fall to either side, so the order is the format.
Where we differ: a weight of zeros gets a usable scale (torchao: NaN), NaN and infinity are refused, and weights too
small for a finite reciprocal of the scales (below 4e-33) are served by the smallest scale that has one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.numerics import e2m1
from halfbyte.numerics.packing import pack_nibbles
from halfbyte.nvfp4.format import BLOCK_SIZE, E4M3_MAX, E4M3_MIN_NORMAL, NVFP4Parts, check_in_features, row_chunks
from halfbyte.nvfp4.kernels.available import has_triton
from halfbyte.nvfp4.scaling import LARGEST_BLOCK_SCALE, SMALLEST, global_scale_for

CHUNK_VALUES = 1 << 18  # rows are quantized about this many values at a time
EncodeRows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def quantize(
    weight: Tensor, *, global_scale: Tensor | None = None, name: str = "weight", scales: str = "max"
) -> NVFP4Parts:
    """Encode a matrix as NVFP4.

    weight        [N, K] bf16, fp16 or fp32, K divisible by 16.
    global_scale  fp32 [] or [1] to use; else `global_scale_for` the weight's largest magnitude.
    name          the layer, for error messages.
    scales        "max": a block's largest magnitude maps to 6. "four-over-six": to 6 or to 4, whichever has the smaller
                  squared error in that block (arXiv 2512.02010).
    returns       qdata [N, K/2] uint8, scale [N, K/16] e4m3, global_scale [] fp32. 4.5 bits per value.
    raises        ValueError for a NaN or infinity in the weight, a bad shape, or a global scale that cannot be used.
    """
    check_weight(weight, name, scales)
    with torch.no_grad():
        amax = largest_magnitude(weight, name)
        if global_scale is None:
            global_scale = global_scale_for(amax, scales=scales)
        global_scale = check_global_scale(global_scale, weight.device, name)
        if scales == "max":
            qdata, scale = encode(weight, global_scale)
        else:
            qdata, scale = encode_chunks(weight, global_scale, quantize_rows_four_over_six)
    return NVFP4Parts(qdata, scale.view(torch.float8_e4m3fn), global_scale)


@torch.library.custom_op("halfbyte::nvfp4_encode", mutates_args=())
def encode(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The quantizer alone, without checks and without waiting for a GPU: x [M, K] bf16, fp16 or fp32, global_scale
    fp32 [] -> qdata uint8 [M, K/2], scale uint8 [M, K/16]. A block with a NaN gets the scale NaN."""
    return encode_chunks(x, global_scale, quantize_rows)


@encode.register_kernel("cuda")
def _(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    if not has_triton():
        return encode_chunks(x, global_scale, quantize_rows)
    from halfbyte.nvfp4.kernels.quantize_triton import quantize as encode_triton

    return encode_triton(x, global_scale)


@encode.register_fake
def _(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    return x.new_empty(m, k // 2, dtype=torch.uint8), x.new_empty(m, k // BLOCK_SIZE, dtype=torch.uint8)


def encode_chunks(x: Tensor, global_scale: Tensor, encode_rows: EncodeRows) -> tuple[Tensor, Tensor]:
    """A chunk of rows at a time, so that temporaries stay in cache: (qdata, scale), uint8."""
    m, k = x.shape
    qdata = torch.empty(m, k // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(m, k // BLOCK_SIZE, dtype=torch.uint8, device=x.device)
    for rows in row_chunks(m, k, CHUNK_VALUES):
        codes, block_scale = encode_rows(x[rows].float(), global_scale)
        qdata[rows], scale[rows] = codes, block_scale.view(torch.uint8)
    return qdata, scale


def quantize_rows(x_NK: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 rows [n, K] -> (qdata, scale), block maxima mapped to 6."""
    blocks = x_NK.unflatten(-1, (-1, BLOCK_SIZE))
    scale = encode_scale(blocks.abs().amax(-1) / e2m1.E2M1_MAX, global_scale)
    return encode_blocks(blocks, scale, global_scale), scale


def quantize_rows_four_over_six(x_NK: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_rows`, but a block's maximum maps to 4 where that has the smaller squared error."""
    blocks = x_NK.unflatten(-1, (-1, BLOCK_SIZE))
    amax = blocks.abs().amax(-1)
    results = []
    for target in (6.0, 4.0):
        scale = encode_scale(amax / target, global_scale)
        codes = encode_codes(blocks, scale, global_scale)
        error = (e2m1.decode(codes) * (scale.float() * global_scale).unsqueeze(-1) - blocks).square().sum(-1)
        results.append((scale, codes, error))
    (scale_6, codes_6, error_6), (scale_4, codes_4, error_4) = results
    four = error_4 < error_6
    codes = torch.where(four.unsqueeze(-1), codes_4, codes_6)
    scale_bits = torch.where(four, scale_4.view(torch.uint8), scale_6.view(torch.uint8))
    return pack_nibbles(codes.flatten(-2)), scale_bits.view(torch.float8_e4m3fn)


def encode_scale(block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [n, K/16] -> E4M3 relative to the global scale. Never below 2^-6, so a block of zeros is finite."""
    return (block_scale / global_scale).clamp_(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_codes(blocks: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [n, K/16, 16] -> uint8 codes, same shape."""
    reciprocal = (1.0 / global_scale) / scale.float()
    return e2m1.encode((blocks * reciprocal.unsqueeze(-1)).clamp_(-e2m1.E2M1_MAX, e2m1.E2M1_MAX))


def encode_blocks(blocks: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 [n, K/16, 16] -> packed codes, uint8 [n, K/2]."""
    return pack_nibbles(encode_codes(blocks, scale, global_scale).flatten(-2))


def check_weight(weight: Tensor, name: str, scales: str) -> None:
    """ValueError for a weight that is no floating matrix with whole blocks, or an unknown scale rule."""
    if scales not in LARGEST_BLOCK_SCALE:
        raise ValueError(f"scales is {scales!r}, expected one of {', '.join(map(repr, LARGEST_BLOCK_SCALE))}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name}: NVFP4 encodes a floating-point matrix [out, in], got {weight.dtype} {list(weight.shape)}; pass a "
            "linear layer's dense weight"
        )
    check_in_features(weight.shape[1], name)


def largest_magnitude(weight: Tensor, name: str = "weight") -> Tensor:
    """Largest |value|, fp32 []; ValueError if any value is NaN or infinite. An empty weight gives 0."""
    if weight.numel() == 0:
        return torch.zeros((), device=weight.device)
    low, high = torch.aminmax(weight.detach())
    amax = torch.maximum(low.abs(), high.abs()).float()
    if not torch.isfinite(amax):
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(
            f"{name}: {bad} of {weight.numel()} values are NaN or infinite, and NVFP4 has no code for them. "
            "Repair the weight, or exclude this layer from quantization."
        )
    return amax


def check_global_scale(global_scale: Tensor, device: torch.device, name: str) -> Tensor:
    """The scale as fp32 [] on the device; ValueError unless it is finite and not too small for reciprocals to be."""
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=device).detach()
    if scale.numel() != 1:
        raise ValueError(
            f"{name}: global_scale has shape {list(scale.shape)}, expected one number: NVFP4 has one scale for the "
            "whole tensor. Leave it out to have it chosen from the weight."
        )
    scale = scale.reshape(())
    value = scale.item()
    if not SMALLEST <= value < float("inf"):
        raise ValueError(
            f"{name}: global_scale is {value}, expected a finite number of at least {SMALLEST:.3g}. "
            "Leave it out to have it chosen from the weight."
        )
    return scale
