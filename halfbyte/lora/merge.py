"""The merged 4-bit weight: base + scaling * B @ A, back on NVFP4. One function, for the trainer and for the writer.

Its bits are the format: what merge-aware training multiplies with is what `halfbyte merge` writes. So the order of
operations and dtypes is fixed here, and does not depend on autocast, TF32, the device or the sharding:

* delta = fp32(scaling * (B @ A)), the product in fp64. Products of fp32 factors are exact there and the sum's error is
  2^-53, so the order of summation reaches an fp32 bit about once in 10^8 elements, and a code far more rarely.
* "dither" (default) rounds in code space on the base's scales with fixed offsets (nvfp4/snap.py).
* "nearest" with fresh scales is what other tools' files expect: fp32 sum, rounded to the base's original dtype, then
  the quantizer on the base's global scale. What is small against its step vanishes.

A zero delta returns the base's bytes in every mode.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.lora.snap_adapter import delta_chunks, snap_adapter
from halfbyte.numerics.dither import block_keys, offsets, row_keys
from halfbyte.numerics.e2m1 import E2M1_MAX
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import BLOCK_SIZE, NVFP4Parts
from halfbyte.nvfp4.quantize import encode_scale, quantize_rows
from halfbyte.nvfp4.snap import snap

Rounding = Literal["dither", "nearest"]
Scales = Literal["keep", "fresh"]
ROUNDINGS = ("dither", "nearest")
SCALES = ("keep", "fresh")


def merged_parts(
    parts: NVFP4Parts,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    name: str,
    seed: int = 0,
    rounding: Rounding = "dither",
    scales: Scales = "keep",
    dtype: torch.dtype = torch.float32,
    row_offset: int = 0,
    column_offset: int = 0,
) -> NVFP4Parts:
    """W' = Q(dequantize(parts) + scaling * lora_B @ lora_A), a new set of parts on the base's global scale.

    parts     the base, [N, K].
    lora_A    [r, K], lora_B [N, r], any float dtype, on the parts' device.
    name      of the weight in the base model, without PEFT's prefixes ("model.layers.0.mlp.up_proj"); with seed it
              chooses the dither's offsets.
    rounding  "dither" or "nearest"; scales "keep" (the base's block scales) or "fresh" (from the merged block maxima).
    dtype     the base's original dtype; only "nearest" rounds to it before the quantizer.
    row_offset, column_offset   where a shard begins in the whole weight, so that it is rounded as the whole would be;
                                the column a multiple of 16.
    raises    ValueError for an unknown mode, factors that do not fit, or a NaN or infinite factor.
    """
    check_modes(rounding, scales)
    check_factors(parts, lora_A, lora_B, name)
    recipe = Recipe(name, seed, rounding, scales, dtype, row_offset, column_offset)
    return NVFP4Parts(*(component.clone() for component in merge(parts, lora_A, lora_B, scaling, recipe)))


class Recipe(NamedTuple):
    """How a weight is merged; the fields are the arguments of `merged_parts`.

    changed   True for a shard whose own change may be zero while the whole weight's is not: fresh scales apply to it.
    """

    name: str
    seed: int = 0
    rounding: Rounding = "dither"
    scales: Scales = "keep"
    dtype: torch.dtype = torch.float32
    row_offset: int = 0
    column_offset: int = 0
    changed: bool = False


@torch.no_grad()
def merge(parts: NVFP4Parts, lora_A: Tensor, lora_B: Tensor, scaling: float, recipe: Recipe) -> NVFP4Parts:
    """`merged_parts` without checks and copies: what did not change is the base's own tensor. A zero adapter gives the
    base's bytes, on fresh scales too; there it waits for a GPU, on the base's scales never."""
    with torch.autocast(parts.qdata.device.type, enabled=False):
        if recipe.scales == "keep":
            qdata = snap_adapter(
                parts,
                lora_A,
                lora_B,
                scaling,
                name=recipe.name,
                seed=recipe.seed,
                dither=recipe.rounding == "dither",
                row_offset=recipe.row_offset,
                column_offset=recipe.column_offset,
            )
            return parts._replace(qdata=qdata)
        if not recipe.changed and not (lora_A.any() and lora_B.any()):
            return parts
        return on_fresh_scales(parts, lora_A, lora_B, scaling, recipe)


def on_fresh_scales(parts: NVFP4Parts, lora_A: Tensor, lora_B: Tensor, scaling: float, recipe: Recipe) -> NVFP4Parts:
    """The merged weight with block scales from its own maxima, a chunk of rows at a time."""
    seed, name, device = recipe.seed, recipe.name, parts.qdata.device
    qdata, scale = torch.empty_like(parts.qdata), torch.empty_like(parts.scale)
    blocks = block_keys(seed, name, recipe.column_offset // BLOCK_SIZE, parts.scale.shape[1], device)
    for rows, delta in delta_chunks(lora_A, lora_B, scaling):
        piece = NVFP4Parts(parts.qdata[rows], parts.scale[rows], parts.global_scale)
        offset = None
        if recipe.rounding == "dither":
            offset = offsets(row_keys(seed, name, recipe.row_offset + rows.start, len(delta), device), blocks)
        qdata[rows], scale[rows] = requantize(piece, delta, offset, recipe.dtype)
    return NVFP4Parts(qdata, scale, parts.global_scale)


def requantize(piece: NVFP4Parts, delta: Tensor, offset: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(qdata, scale) of base + delta with block scales from the merged block maxima."""
    merged = dequantize(piece) + delta
    if offset is None:
        return quantize_rows(merged.to(dtype).float(), piece.global_scale)
    scale = encode_scale(merged.unflatten(-1, (-1, BLOCK_SIZE)).abs().amax(-1) / E2M1_MAX, piece.global_scale)
    origin = NVFP4Parts(torch.zeros_like(piece.qdata), scale, piece.global_scale)
    return snap(origin, merged, offset), scale


def check_modes(rounding: str, scales: str) -> None:
    """ValueError for a mode that does not exist."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding is {rounding!r}, expected one of {', '.join(map(repr, ROUNDINGS))}")
    if scales not in SCALES:
        raise ValueError(f"scales is {scales!r}, expected one of {', '.join(map(repr, SCALES))}")


def check_factors(parts: NVFP4Parts, lora_A: Tensor, lora_B: Tensor, name: str) -> None:
    """ValueError for factors whose shapes do not multiply to the weight's, or that are not finite."""
    n, k = parts.shape
    if lora_A.dim() != 2 or lora_B.shape != (n, lora_A.shape[0]) or lora_A.shape[1] != k:
        raise ValueError(
            f"{name}: lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)} do not multiply to the base weight "
            f"[{n}, {k}]; expected [r, {k}] and [{n}, r]. Is this the adapter of another model? Use the base it was "
            "trained on."
        )
    if not (torch.isfinite(lora_A).all() and torch.isfinite(lora_B).all()):
        raise ValueError(
            f"{name}: the adapter holds NaN or infinite values; it cannot be merged. Take an earlier checkpoint."
        )
