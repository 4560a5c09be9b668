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

Measured on 32,768 values on a CPU and rejected: the code as a strided byte view instead of a shift and a cast (27 us
against 15), the upper half as a strided 16-bit view (25 against 16) or of a bfloat16 (24), 8-bit codes decoded two at a
time from 512 KB (32 to 104 against 45), fp8 codes by torch's cast (177) or as the bits of an fp16 (68).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from halfbyte.optim.formats import SCALE_MIN, StateFormat, codebook, midpoints, top_code, zero_code

PIECE = 2**22
"""Values that `quantize` works on at a time."""


@lru_cache
def _carry_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """int32 [65536], by the upper half of y's pattern as an unsigned number; see `nearest_code`.

    An interval's patterns, in the order of their numbers, are first .. first + 65,535. The entry is
    (lowest << 16) - first, plus 65,536 - (cut - first) where the interval has a cut; wrapped into int32.
    """
    upper = torch.arange(65536, dtype=torch.int64, device="cpu") << 16
    first = _ordered(torch.where(upper < 2**31, upper, upper + 65535))
    cuts = _ordered(midpoints(name, signed).view(torch.int32).to(torch.int64) & 0xFFFFFFFF)
    if name == "8bit" and not signed:
        cuts[0] = 1  # rule 1: code 0 is for 0 alone, so the least positive number starts code 1
    lowest = torch.bucketize(first, cuts, right=True)
    crossed = torch.bucketize(first + 65535, cuts, right=True) > lowest
    next_cut = torch.cat([cuts, cuts[-1:]])[lowest]
    table = (lowest << 16) - first + torch.where(crossed, 65536 - (next_cut - first), 0)
    return ((table + 2**31) % 2**32 - 2**31).to(device, torch.int32)


def _ordered(pattern: Tensor) -> Tensor:
    """int64 fp32 patterns in [0, 2^32) as integers in the order of the numbers, -0.0 equal to 0.0."""
    return torch.where(pattern < 2**31, pattern, 2**31 - pattern)


@lru_cache
def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """A 0-d tensor. As an operand it saves torch the conversion of a Python number, 4 us at each operation; with 32,768
    values the whole operation takes 5 to 10."""
    return torch.tensor(value, dtype=dtype, device="cpu")


@lru_cache
def decode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """`codebook` on a device."""
    return codebook(name, signed).to(device)


@lru_cache
def _pair_table(signed: bool, device: torch.device) -> Tensor:
    """The two 4-bit values of each byte: their fp32 patterns as one int64, [256], the even element first."""
    values, byte = codebook("4bit", signed), torch.arange(256, device="cpu")
    return torch.stack([values[byte >> 4], values[byte & 15]], dim=-1).view(torch.int64).view(256).to(device)


def nearest_code(y: Tensor, name: str, *, signed: bool, out: Tensor | None = None) -> Tensor:
    """Code of each normalized value, unpacked uint8 [n], in `out` if given.

    y  [n] fp32, finite; without a sign bit (>= +0.0) if not signed; at most 1 for unsigned 4 bits, and for fp8 448
       and some roundings.

    The unsigned 4-bit map is linear, so its code is 16 y - 0.5 cut to an integer (exact: a power of two, and a
    difference that has no more bits than y; what is below the first code is cut to 0).
    Rule 1 holds for y of the unsigned 8-bit map: the table has it. |pattern|, as an integer, is `_ordered` of a
    positive number and 2^31 more of a negative one (also of -0.0: |-2^31| wraps to itself). Wrapping and the 2^31
    leave the code, bits 16 to 23 of the sum, alone.
    """
    out = torch.empty_like(y, dtype=torch.uint8) if out is None else out
    if name == "fp8":
        out.view(torch.float8_e4m3fn).copy_(y)
        return out
    if name == "4bit" and not signed:
        out.view(torch.int8).copy_(torch.add(scalar(-0.5, torch.float32), y, alpha=16))  # to uint8 takes twice as long
        return out
    pattern = y.view(torch.int32)
    upper = pattern >> scalar(16, torch.int32)
    if signed:
        upper &= scalar(65535, torch.int32)
    carried = _carry_table(name, signed, y.device).index_select(0, upper)
    carried += pattern.abs() if signed else pattern
    carried >>= scalar(16, torch.int32)
    return out.copy_(carried)


def pack(codes: Tensor) -> Tensor:
    """[n] 4-bit codes -> [ceil(n/2)] bytes, the even element in the high nibble (torchao's order)."""
    if codes.numel() % 2:
        codes = torch.cat([codes, codes.new_zeros(1)])
    pairs = codes.contiguous().view(torch.int16)  # even + 256 * odd
    shifted = pairs * scalar(4097, torch.int16)  # even << 12 | odd << 8 | even, modulo 2^16
    return (shifted >> scalar(8, torch.int16)).to(torch.uint8)


def unpack(packed: Tensor, numel: int) -> Tensor:
    """[ceil(n/2)] bytes -> [n] 4-bit codes."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).reshape(-1)[:numel]


def block_amax(x: Tensor, block_size: int, *, signed: bool = True) -> Tensor:
    """Largest magnitude of each block: x [n] -> [ceil(n/block_size)]; NaN or Inf where the block holds one.

    torch gives 32,768 values of a reduction to several threads (of other operations only more); halves of the blocks
    are compared first, so that `step_ref`'s chunks need no threads.
    """
    x = x.abs() if signed else x
    whole = x.numel() // block_size * block_size
    blocks, half = x[:whole].view(-1, block_size), block_size // 2
    if block_size % 2 == 0 and whole >= 32768:
        blocks = torch.maximum(blocks[:, :half], blocks[:, half:])
    amax = blocks.amax(1)
    if whole == x.numel():
        return amax
    return torch.cat([amax, x[whole:].amax().view(1)])


def per_element(per_block: Tensor, block_size: int, numel: int) -> Tensor:
    """[ceil(n/block_size)] -> [n]."""
    return per_block.repeat_interleave(block_size)[:numel]


def _divide_(x: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """x [n] / its block's scale, in place."""
    if x.numel() % block_size == 0:
        x.view(-1, block_size).div_(scale.unsqueeze(1))
        return x
    return x.div_(per_element(scale, block_size, x.numel()))


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
    scale = _scale(block_amax(x, fmt.block_size, signed=signed), fmt)
    codes = _encode_(x, scale, fmt, signed=signed)
    codes.masked_fill_(bad, zero_code(fmt.name, signed) if signed else top_code(fmt.name))
    return (pack(codes) if fmt.bits == 4 else codes), scale


def _piece(fmt: StateFormat) -> int:
    """About half of PIECE, in whole blocks and bytes."""
    return 2 * fmt.block_size * max(1, PIECE // (4 * fmt.block_size))


def quantize_finite_(
    x: Tensor, amax: Tensor, fmt: StateFormat, codes: Tensor, scale: Tensor, *, signed: bool, largest: float
) -> None:
    """`quantize` into codes and scale. x, finite, is overwritten; amax is its `block_amax`, `largest` at most."""
    _scale(amax, fmt, out=scale)
    if fmt.bits == 8:
        _encode_(x, scale, fmt, signed=signed, largest=largest, out=codes)
    else:
        codes.copy_(pack(_encode_(x, scale, fmt, signed=signed, largest=largest)))


def _scale(amax: Tensor, fmt: StateFormat, out: Tensor | None = None) -> Tensor:
    """max(amax, SCALE_MIN) / code_max."""
    scale = torch.clamp(amax, min=SCALE_MIN, out=out)
    return scale if fmt.code_max == 1 else scale.div_(fmt.code_max)


def _encode_(
    x: Tensor, scale: Tensor, fmt: StateFormat, *, signed: bool, largest: float = math.inf, out: Tensor | None = None
) -> Tensor:
    """Codes, unpacked. x, which has no -0.0 if not signed, is overwritten; no block's amax is above `largest`.

    Rule 1 takes operations of its own for fp8, and for 8 bits where y may be 0 though x is not. It cannot be where the
    scale, amax or SCALE_MIN, is 1 at most: y >= x.
    """
    in_table = signed or fmt.bits == 4 or (fmt.name == "8bit" and largest <= 1)
    positive = None if in_table else x.view(torch.int32).clamp(max=1).to(torch.uint8)  # x > 0 takes four times as long
    codes = nearest_code(_divide_(x, scale, fmt.block_size), fmt.name, signed=signed, out=out)
    return codes if positive is None else torch.maximum(codes, positive, out=codes)


def dequantize(codes: Tensor, scale: Tensor, fmt: StateFormat, numel: int, *, signed: bool) -> Tensor:
    """Decode a flat moment: codes and scale as `quantize` returns them -> [numel] fp32."""
    if fmt.bits == 4:
        values = _pair_table(signed, codes.device).index_select(0, codes.int()).view(torch.float32)[:numel]
    else:
        values = decode_table(fmt.name, signed, codes.device).index_select(0, codes.int())
    if numel % fmt.block_size == 0:
        return values.view(-1, fmt.block_size).mul_(scale.unsqueeze(1)).view(-1)
    return values * per_element(scale, fmt.block_size, numel)
