"""States of other libraries, as tensors that were already read: what they hold, in fp32.

torchao 0.18   values with attributes `codes`, `scale` (and `qmap`, `signed`): its tensor subclasses, or the stand-ins
               that `halfbyte.optim.convert` reads without torchao. Same codes as ours, so the same block size is kept
               bit for bit.
bitsandbytes   "state1", "state2" uint8 with "qmap1", "absmax1", ...; blockwise (256 or 2,048 values) or one "max1".
torch          "exp_avg", "exp_avg_sq" in any floating dtype.

Repair: torchao and bitsandbytes round a small second moment to zero while its first moment lives, and the next step
would divide by eps. It gets its block's smallest positive value, which is an upper bound of what it was.
"""

from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.state_ops import dequantize

BNB_NESTED = "__bnb_optimizer_quant_state__"  # how bitsandbytes hides its tensors from FSDP
BNB_NAMES = {"exp_avg": "1", "exp_avg_sq": "2"}


def is_torchao(value: Any) -> bool:
    """Whether a state value is a quantized tensor of torchao (or a stand-in for one)."""
    return hasattr(value, "codes") and hasattr(value, "scale")


def source_of(state: dict[str, Any]) -> str:
    """Which library wrote one parameter's state: "halfbyte", "torchao", "bitsandbytes" or "torch"."""
    if BNB_NESTED in state or "state1" in state:
        return "bitsandbytes"
    if is_torchao(state.get("exp_avg")):
        return "torchao"
    return "halfbyte" if "exp_avg_scale" in state else "torch"


def torchao_format(value: Any) -> StateFormat:
    """Name and block size of a torchao tensor; its block size is not stored but follows from the counts."""
    codes, scale = value.codes, value.scale
    name = "fp8" if codes.dtype == torch.float8_e4m3fn else "4bit" if value.qmap.numel() == 16 else "8bit"
    numel = codes.numel() * (2 if name == "4bit" else 1)
    return FORMATS[name].with_block_size(numel // scale.numel())


def torchao_moments(state: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, StateFormat]]:
    """(codes, scale, format) of each moment, flat, with the second moments repaired."""
    moments = {}
    for name, value in state.items():
        if is_torchao(value):
            fmt = torchao_format(value)
            moments[name] = (value.codes.reshape(-1).view(torch.uint8), value.scale.float(), fmt)
    live = dequantize(*moments["exp_avg"], state["exp_avg"].numel(), signed=True) != 0
    for name in moments.keys() - {"exp_avg"}:
        codes, scale, fmt = moments[name]
        if fmt.bits == 8:
            moments[name] = (torch.where(live & (codes == 0), 1, codes).to(torch.uint8), scale, fmt)
    return moments


def bitsandbytes_values(state: dict[str, Any]) -> dict[str, Tensor]:
    """fp32 values of the parameter's shape, by our names, with the second moment repaired."""
    state = {**state, **state.get(BNB_NESTED, {})}
    values, smallest = {}, None
    for name, digit in BNB_NAMES.items():
        raw = state["state" + digit]
        if raw.dtype != torch.uint8:
            values[name] = raw.float()
            continue
        qmap = state["qmap" + digit].float()
        absmax = state["absmax" + digit] if "absmax" + digit in state else state["max" + digit]
        block = _bitsandbytes_block(raw.numel(), absmax.numel())
        spread = absmax.reshape(-1).float().repeat_interleave(block)[: raw.numel()].view(raw.shape)
        values[name] = qmap[raw.long()] * spread
        smallest = qmap[qmap > 0].min() * spread
    if smallest is not None:
        lost = (values["exp_avg_sq"] == 0) & (values["exp_avg"] != 0)
        values["exp_avg_sq"] = torch.where(lost, smallest, values["exp_avg_sq"])
    return values


def holds_codes(state: dict[str, Any]) -> bool:
    """Whether a bitsandbytes state is quantized; it keeps parameters below 4,096 values in fp32."""
    return "qmap1" in {**state, **state.get(BNB_NESTED, {})}


def _bitsandbytes_block(numel: int, num_blocks: int) -> int:
    """The block size that gives this number of blocks; bitsandbytes does not store it."""
    if num_blocks == 1:
        return max(numel, 1)
    for block in (256, 2048, 4096, 1024, 512, 128, 64):
        if -(-numel // block) == num_blocks:
            return block
    raise ValueError(
        f"a bitsandbytes state has {numel} values in {num_blocks} blocks, which is none of its block sizes (64 to "
        "4096). Load the state dict as bitsandbytes saved it."
    )
