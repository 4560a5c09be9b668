"""One dense weight plus an adapter's change: added in fp32, rounded once, and measured."""

from pathlib import Path

import torch
from torch import Tensor

from halfbyte.checkpoint.adapter import Factors
from halfbyte.lora.merge import delta_chunks
from halfbyte.lora.retention import Retention, measure
from halfbyte.nvfp4.dequantize import dequantize
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.quantize import row_chunks

FOREIGN = 0.25  # relative distance of a dense base from the 4-bit one above which it is another model; ours is 0.1


def as_linear(factors: Factors) -> Factors:
    """An embedding's factors turned so that delta = scaling * B @ A has the weight's shape [vocabulary, hidden]."""
    if not factors.embedding:
        return factors
    return Factors(factors.lora_B.T.contiguous(), factors.lora_A.T.contiguous(), factors.scaling, False)


def check_shape(value: Tensor, factors: Factors, name: str) -> None:
    shape = (factors.lora_B.shape[0], factors.lora_A.shape[1])
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name}: the adapter's change is {list(shape)}, the base's weight {list(value.shape)}. Use the base it "
            "was trained on."
        )
    if not (torch.isfinite(factors.lora_A).all() and torch.isfinite(factors.lora_B).all()):
        raise ValueError(
            f"{name}: the adapter holds NaN or infinite values; it cannot be merged. Take an earlier checkpoint."
        )


def add_delta(weight: Tensor, factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Retention]:
    """(weight + delta rounded once to dtype, what was kept). A zero delta leaves the weight's bits alone."""
    if not factors.lora_A.any() or not factors.lora_B.any():
        return weight.to(dtype), Retention()
    merged, kept = torch.empty(weight.shape, dtype=dtype), Retention()
    for rows, delta in delta_chunks(factors.lora_A, factors.lora_B, factors.scaling):
        before = weight[rows].float()
        merged[rows] = (before + delta).to(dtype)
        kept += measure(delta, merged[rows].double() - before.double(), before)
    return merged, kept


def check_original(fqn: str, original: Tensor, parts: NVFP4Parts, path: Path) -> None:
    """ValueError when the dense weight is no near relative of the 4-bit one."""
    wrong = total_square = 0.0
    for rows in row_chunks(*original.shape):
        decoded = dequantize(NVFP4Parts(parts.qdata[rows], parts.scale[rows], parts.global_scale), torch.float32)
        wrong += float((decoded - original[rows]).square().sum())
        total_square += float(original[rows].square().sum())
    if wrong > FOREIGN**2 * total_square:
        distance = (wrong / total_square) ** 0.5 if total_square else float("inf")
        raise ValueError(
            f"{path}: {fqn} differs from the base's by {distance:.0%}, where quantizing explains about 10%. This is "
            "not the dense original of that base. Give that one, or leave --onto out."
        )


def bits(scale: Tensor) -> Tensor:
    """E4M3 scales as bytes, for comparing."""
    return scale.view(torch.uint8)
