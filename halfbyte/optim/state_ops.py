"""Quantize and dequantize one moment: the definition every kernel is tested against.

    scale = max(amax, 1e-30) / code_max            amax over the block's finite values
    y     = value / scale                          IEEE fp32 division
    code  = the codebook entry nearest to y; a tie goes to the higher one (8bit, 4bit) or to even (fp8)
    code  = max(code, 1) where a second moment is > 0   (rule 1; the 4-bit map has no zero, so nothing to do)

A value that is not finite takes no part in its block's scale and touches no neighbour. It has no code in the 8- and
4-bit maps, so it is stored as 0 (signed) or as the block's largest value (unsigned). Why that is right: after a NaN or
Inf gradient the parameter itself is NaN, as in torch, and stays NaN whatever the moments say; after a finite gradient
whose square overflows (|g| > 1.8e19) torch's update is m / inf = 0, and ours is 0 in that step too, and afterwards at
most an ordinary one, since m restarts from 0 under a large second moment.

The nearest code is found without a search: the upper 16 bits of y's fp32 pattern (a bfloat16) name an interval that
holds at most one midpoint. A table holds, for each interval, its lowest code times 65,536 plus what the lower 16 bits
lack to reach the midpoint, so adding them carries into the code where y is above it. A binary search over the midpoints
(`torch.bucketize`) costs 35 ns a value on a CPU, this 2 ns. Codes of 4 bits are decoded a byte, two values, at a time.
"""

from functools import lru_cache

import torch
from torch import Tensor

from halfbyte.optim.formats import SCALE_MIN, StateFormat, codebook, midpoints, top_code, zero_code

PIECE = 2**22
"""Values that `quantize` works on at a time."""


@lru_cache
def _carry_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """int32 [65536], by the upper half of `_ordered(y)` as an unsigned number; see the file's docstring."""
    upper = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.int16).to(torch.int32) << 16
    first, last = _ordered(upper).view(torch.float32), _ordered(upper + 65535).view(torch.float32)
    cuts = midpoints(name, signed)
    lowest = torch.bucketize(first.nan_to_num(0.0), cuts, right=True)
    crossed = torch.bucketize(last.nan_to_num(0.0), cuts, right=True) > lowest
    next_cut = _ordered(torch.cat([cuts, cuts[-1:]])[lowest].view(torch.int32)) & 65535
    return ((lowest << 16) + torch.where(crossed, 65536 - next_cut, 0)).to(device, torch.int32)


def _ordered(bits: Tensor) -> Tensor:
    """fp32 bit patterns as integers in the order of the numbers (and the reverse: it is its own inverse)."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@lru_cache
def decode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """`codebook` on a device."""
    return codebook(name, signed).to(device)


@lru_cache
def _pair_table(signed: bool, device: torch.device) -> Tensor:
    """The two 4-bit values of each byte: their fp32 patterns as one int64, [256], the even element first."""
    values, byte = codebook("4bit", signed), torch.arange(256, device="cpu")
    return torch.stack([values[byte >> 4], values[byte & 15]], dim=-1).view(torch.int64).view(256).to(device)


def nearest_code(y: Tensor, name: str, *, signed: bool) -> Tensor:
    """Code of each normalized value, unpacked uint8 of the same shape; rule 1 is not applied.

    y  fp32, finite; without a sign bit (>= +0.0) if not signed.
    """
    if name == "fp8":
        return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = y.reshape(-1).view(torch.int32)
    if signed:
        bits = _ordered(bits)
    upper = (bits >> 16) & 65535 if signed else bits >> 16
    carried = _carry_table(name, signed, y.device).index_select(0, upper).add_(bits & 65535)
    return (carried >> 16).to(torch.uint8).view(y.shape)


def pack(codes: Tensor) -> Tensor:
    """[n] 4-bit codes -> [ceil(n/2)] bytes, the even element in the high nibble (torchao's order)."""
    if codes.numel() % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    pairs = codes.contiguous().view(torch.int16)  # the even element in the low byte
    return ((pairs << 4) | (pairs >> 8)).to(torch.uint8)


def unpack(packed: Tensor, numel: int) -> Tensor:
    """[ceil(n/2)] bytes -> [n] 4-bit codes."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).reshape(-1)[:numel]


def block_amax(x: Tensor, block_size: int, *, signed: bool = True) -> Tensor:
    """Largest magnitude of each block: x [n] -> [ceil(n/block_size)]; NaN or Inf where the block holds one."""
    x = x.abs() if signed else x
    whole = x.numel() // block_size * block_size
    amax = x[:whole].view(-1, block_size).amax(1)
    if whole == x.numel():
        return amax
    return torch.cat([amax, x[whole:].amax().view(1)])


def per_element(per_block: Tensor, block_size: int, numel: int) -> Tensor:
    """[ceil(n/block_size)] -> [n]."""
    return per_block.repeat_interleave(block_size)[:numel]


def _divide(x: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """x [n] / its block's scale."""
    if x.numel() % block_size == 0:
        return (x.view(-1, block_size) / scale.unsqueeze(1)).view(-1)
    return x / per_element(scale, block_size, x.numel())


def quantize(x: Tensor, fmt: StateFormat, *, signed: bool, bad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Encode a flat moment.

    x        [n] fp32, any n; signed for exp_avg, else >= 0 (exp_avg_sq, max_exp_avg_sq).
    bad      [n] bool: elements to treat as not finite; None finds them in x.
    returns  codes uint8 [n] (8 bits) or [ceil(n/2)] (4 bits); scale fp32 [ceil(n/block_size)].
    """
    if x.numel() == 0:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty(0)
    if x.numel() > max(PIECE, _piece(fmt)):  # bounds the temporaries when a checkpoint is converted
        pieces = x.split(_piece(fmt))
        bads = [None] * len(pieces) if bad is None else bad.split(_piece(fmt))
        parts = [quantize(piece, fmt, signed=signed, bad=b) for piece, b in zip(pieces, bads, strict=True)]
        return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])
    bad = ~x.isfinite() if bad is None else bad
    x = x.masked_fill(bad, 0.0) if signed else x.masked_fill(bad, 0.0).abs()  # -0.0 becomes 0.0
    codes, scale = _encode(x, block_amax(x, fmt.block_size, signed=signed), fmt, signed=signed)
    codes.masked_fill_(bad, zero_code(fmt.name, signed) if signed else top_code(fmt.name))
    return (pack(codes) if fmt.bits == 4 else codes), scale


def _piece(fmt: StateFormat) -> int:
    """About half of PIECE, in whole blocks and bytes."""
    return 2 * fmt.block_size * max(1, PIECE // (4 * fmt.block_size))


def quantize_finite(x: Tensor, amax: Tensor, fmt: StateFormat, *, signed: bool) -> tuple[Tensor, Tensor]:
    """`quantize` of finite values whose `block_amax` is at hand."""
    codes, scale = _encode(x, amax, fmt, signed=signed)
    return (pack(codes) if fmt.bits == 4 else codes), scale


def _encode(x: Tensor, amax: Tensor, fmt: StateFormat, *, signed: bool) -> tuple[Tensor, Tensor]:
    scale = amax.clamp(min=SCALE_MIN) / fmt.code_max
    codes = nearest_code(_divide(x, scale, fmt.block_size), fmt.name, signed=signed)
    if not signed and fmt.bits == 8:
        codes = torch.maximum(codes, (x > 0).view(torch.uint8))
    return codes, scale


def dequantize(codes: Tensor, scale: Tensor, fmt: StateFormat, numel: int, *, signed: bool) -> Tensor:
    """Decode a flat moment: codes and scale as `quantize` returns them -> [numel] fp32."""
    if fmt.bits == 4:
        values = _pair_table(signed, codes.device).index_select(0, codes.int()).view(torch.float32)[:numel]
    else:
        values = decode_table(fmt.name, signed, codes.device).index_select(0, codes.int())
    if numel % fmt.block_size == 0:
        return values.view(-1, fmt.block_size).mul_(scale.unsqueeze(1)).view(-1)
    return values * per_element(scale, fmt.block_size, numel)
