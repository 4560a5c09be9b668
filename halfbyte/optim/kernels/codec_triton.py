"""Codes in a Triton kernel: computed from the bits of the float, never searched.

Encoding the dynamic maps. y = value / scale. The upper bits of y's fp32 pattern (sign, exponent and a few mantissa
bits) name a bin so narrow that the codebook's midpoints in it lie evenly spaced, as they do within a decade, so that

    code = floor(A[bin] * y + B[bin])

One 8-byte lookup, one FMA and one conversion a value; the few bins in use (some dozen of the upper decades) stay in
the L1 cache. y carries a factor STRETCH, which moves the bins so that where the spacing changes (at 0.1, 0.01, ... and
below 1.0) a bin ends; it is folded into the block's reciprocal scale and costs nothing. Lines are fitted in
`encode_table`, whose result differs from `state_ops.nearest_code` only where y lies within 5e-6 of a midpoint.

Decoding is one lookup in the codebook (1 KB). The unsigned 4-bit map is linear and needs no table, and E4M3 is a cast:
in hardware from compute capability 8.9, on bits before that.

Rejected: a binary search (8 dependent lookups a value: 9.2 ms where this kernel's floor is 4.1), the decade from six
comparisons (about 20 instructions more a value), a table over bfloat16 prefixes as the CPU paths have (too large for
the L1 cache).
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.optim.formats import codebook, midpoints

STRETCH = {("8bit", True): 1.2575, ("8bit", False): 1.003 * 2.0**27, ("4bit", True): 1.0}
"""By (format, signed). The mantissas were found by trying all of 1.000, 1.0005 ... 2; see `_fit_bin`. The power of two
is the largest that scale >= 1e-30 allows: it keeps a positive y out of the lowest bin, which is zero's alone, for every
positive value (2^-149 and up) in a block whose largest is at most `UNSIGNED_LIMIT`."""

UNSIGNED_LIMIT = 256.0

BIN_BITS = {("8bit", True): 2, ("8bit", False): 4, ("4bit", True): 1}
"""Mantissa bits that name a bin: the fewest for which a stretch exists."""

_TOLERANCE = 4e-6


def _fit_bin(cuts: Tensor, low: float, high: float, least_code: int) -> tuple[float, float]:
    """(A, B) such that floor(A y + B) is `least_code` at low and one more from each cut on; low <= y < high.

    cuts  fp64, the midpoints in (low, high), ascending; at least one.
    """
    num = cuts.numel()
    code = torch.arange(1, num + 1, dtype=torch.float64, device="cpu")
    slack = _TOLERANCE * cuts.abs()
    # A x + B >= code just above each cut and at low; A x + B < code just below each cut and at high
    at_least = torch.cat([cuts + slack, cuts.new_tensor([low])]), torch.cat([code, code.new_tensor([0.0])])
    below = torch.cat([cuts - slack, cuts.new_tensor([high])]), torch.cat([code, code.new_tensor([num + 1.0])])
    run = at_least[0][:, None] - below[0][None, :]
    slope = (at_least[1][:, None] - below[1][None, :]) / run
    steepest = float(slope[run < 0].min())
    flattest = max(0.0, float(slope[run > 0].max()))
    assert flattest < steepest, "the midpoints of this bin are not evenly spaced; choose another stretch"
    a = (flattest + steepest) / 2
    b = (float((at_least[1] - a * at_least[0]).max()) + float((below[1] - a * below[0]).min())) / 2
    return a, b + least_code


@lru_cache
def encode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """Lines of all bins: fp32 [num_bins, 2], by the upper 9 + BIN_BITS bits of y.

    Not for fp8 and the unsigned 4-bit map. In an unsigned map only the lowest bin, y < 2^-130, has code 0 (rule 1).
    """
    bin_bits = BIN_BITS[name, signed]
    num_bins = 2 ** (9 + bin_bits)
    prefix = torch.arange(num_bins, dtype=torch.int64, device="cpu")
    shift = 23 - bin_bits
    first = (prefix << shift).to(torch.int32).view(torch.float32)  # wraps to negative numbers in the upper half
    last = ((prefix << shift) + (1 << shift) - 1).to(torch.int32).view(torch.float32)
    lows, highs = torch.minimum(first, last), torch.maximum(first, last)
    cuts = midpoints(name, signed).double() * STRETCH[name, signed]
    least_code = 0
    if not signed:  # rule 1: no zero code, so no cut between codes 0 and 1
        cuts, least_code = cuts[1:], 1
    lows, highs = lows.double().nan_to_num(-torch.inf), highs.double().nan_to_num(-torch.inf)  # NaN is never looked up
    before, upto = (torch.searchsorted(cuts, edges, right=True) for edges in (lows, highs))  # midpoints <= an edge
    lines = torch.stack([torch.zeros_like(lows), before + least_code + 0.5], dim=1)  # no midpoint inside: one code
    for i in (upto > before).nonzero().flatten().tolist():
        line = _fit_bin(cuts[before[i] : upto[i]], float(lows[i]), float(highs[i]), least_code + int(before[i]))
        lines[i] = lines.new_tensor(line)
    if not signed:
        lines[0] = lines.new_tensor((0.0, 0.5))
    return lines.float().to(device)


@lru_cache
def decode_table(name: str, signed: bool, device: torch.device) -> Tensor:
    """The codebook on a device: fp32 [256] or [16]."""
    return codebook(name, signed).to(device)


@lru_cache
def lane_tables(name: str, signed: bool, device: torch.device) -> Tensor:
    """What the 32 lanes of a warp hold between them to decode one moment: fp32 [2, 32].

    4-bit        codebook, twice: lane k has the value of code k.
    8-bit signed  (slope, offset) of value = slope * f + offset, f = 4 |code - 127|, by the lower five bits of f's
                 exponent field; the codes of one exponent are a decade of the map.
    8-bit        value = P (mantissa - 8/9) with the mantissa of f = code + 1.5; P by exponent, as above.
    """
    values = codebook(name, signed).double()
    lanes = torch.zeros(2, 32, dtype=torch.float64, device="cpu")
    if name == "4bit":
        lanes[0] = values.repeat(2)
    elif name == "8bit" and signed:
        f = 4 * torch.arange(129, dtype=torch.float32, device="cpu")
        place = (f.view(torch.int32) >> 23) & 31
        for k in place[1:].unique().tolist():
            at, own = f[place == k].double(), values[127:][place == k]
            slope = (own[-1] - own[0]) / (at[-1] - at[0]) if own.numel() > 1 else own[0] / at[0]
            lanes[0, k], lanes[1, k] = slope, own[0] - slope * at[0]
    elif name == "8bit":
        f = torch.arange(256, dtype=torch.float32, device="cpu") + 1.5
        place = (f.view(torch.int32) >> 23) & 31
        mantissa = ((f.view(torch.int32) & 0x7FFFFF) | 0x3F800000).view(torch.float32).double()
        for k in place.unique().tolist():
            last = int((place == k).nonzero()[-1])
            lanes[0, k] = values[last] / (mantissa[last] - 0.8888888955116272)
    return lanes.float().to(device)


@lru_cache
def codec_tables(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(addresses, storage) of a format's tables.

    addresses  int32 [7]: the lower halves of the addresses of exp_avg's lane tables, codebook and encoding lines, then
               of exp_avg_sq's, and last the upper half, which they share.
    storage    the memory that holds the tables; keep it.
    """
    tables = []
    for signed in (True, False):
        tables += [lane_tables(name, signed, device), decode_table(name, signed, device)]
        tables += [encode_table(name, signed, device) if (name, signed) in STRETCH else tables[-1]]
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + -(-table.numel() // 64) * 64)
    storage = torch.zeros(starts[-1], device=device)
    if storage.data_ptr() >> 32 != (storage.data_ptr() + 4 * starts[-1]) >> 32:  # crosses a multiple of 2^32
        storage = torch.zeros(starts[-1], device=device)
    for start, table in zip(starts, tables, strict=False):
        storage[start : start + table.numel()] = table.view(-1)
    first = storage.data_ptr()
    halves = [(first + 4 * start) & 0xFFFFFFFF for start in starts[:-1]] + [first >> 32]
    return torch.tensor(halves, dtype=torch.uint32, device="cpu").view(torch.int32).to(device), storage


@triton.jit
def _pointer(low, high):
    """Halves of an address, int32, as a pointer to fp32."""
    return ((high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)).to(tl.pointer_type(tl.float32))


@triton.jit
def look_up(low, high, index, FAST: tl.constexpr):
    """table[index]: low and high are the halves of the table's address, index int32 >= 0 of any shape.

    FAST: on a GPU. Only the lower half of the address is computed, by one instruction; with 64-bit pointers ptxas makes
    three dependent ones, and if both halves came from one register pair, an idle copy.
    """
    if FAST:
        value = tl.inline_asm_elementwise(
            """{ .reg .b64 at; .reg .b32 low; mad.lo.u32 low, $1, 4, $2; mov.b64 at, {low, $3};
            ld.global.nc.f32 $0, [at]; }""",
            "=f,r,r,r",
            [index, low, high],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(_pointer(low, high) + index)
    return value


@triton.jit
def look_up_two(low, high, index, FAST: tl.constexpr):
    """(table[2 index], table[2 index + 1]), as `look_up`."""
    if FAST:
        a, b = tl.inline_asm_elementwise(
            """{ .reg .b64 at; .reg .b32 low; mad.lo.u32 low, $2, 8, $3; mov.b64 at, {low, $4};
            ld.global.nc.v2.f32 {$0, $1}, [at]; }""",
            "=f,=f,r,r,r",
            [index, low, high],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = tl.load(_pointer(low, high) + 2 * index)
        b = tl.load(_pointer(low, high) + 2 * index + 1)
    return a, b


@triton.jit
def widen(x, FAST: tl.constexpr):
    """bf16, fp16 or fp32 -> fp32. FAST: two bf16 of a register with one instruction each; a plain cast takes three."""
    if FAST and x.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _truncate(x, FAST: tl.constexpr):
    """Integer part of x, in [0, 256): int32 whose low byte is the result; on a GPU by an addition that rounds down."""
    if FAST:
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B000000;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x.to(tl.int32)


@triton.jit
def encode_by_line(y, low, high, BIN_BITS: tl.constexpr, FAST: tl.constexpr):
    """Code of y (stretched fp32, finite) by the line of its bin; low, high: `encode_table`. int32, low byte."""
    place = (y.to(tl.uint32, bitcast=True) >> (23 - BIN_BITS)).to(tl.int32)
    a, b = look_up_two(low, high, place, FAST)
    return _truncate(a * y + b, FAST)


@triton.jit
def encode_linear(y, FAST: tl.constexpr):
    """Code of the unsigned 4-bit map k / 16, k = 1..16, for y in [0, 1]; a tie goes up. int32, low byte."""
    return _truncate(tl.maximum(y * 16.0 - 0.5, 0.5), FAST)


@triton.jit
def load_lane(low, high, FAST: tl.constexpr):
    """A lane table. FAST: each lane's own entry of it, in a register; else the table's address."""
    if FAST:
        lane = tl.inline_asm_elementwise(
            """{ .reg .b64 at; .reg .b32 lane; mov.u32 lane, %laneid; mad.lo.u32 lane, lane, 4, $1;
            mov.b64 at, {lane, $2}; ld.global.f32 $0, [at]; }""",
            "=f,r,r",
            [low, high],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        lane = _pointer(low, high)
    return lane


@triton.jit
def from_lane(lane, index, FAST: tl.constexpr):
    """Entry `index & 31` of a lane table, by a shuffle: it takes no address, and no cache line."""
    if FAST:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
            "=f,f,r",
            [lane, index],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        value = tl.load(lane + (index & 31))
    return value


@triton.jit
def _plus_2_23(code, FAST: tl.constexpr):
    """2^23 + code (uint8), fp32: the code becomes the lowest byte of 0x4B000000."""
    if FAST:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x4B000000, 0x7650; prmt.b32 $1, $4, 0x4B000000, 0x7651;"
            " prmt.b32 $2, $4, 0x4B000000, 0x7652; prmt.b32 $3, $4, 0x4B000000, 0x7653;",
            "=f,=f,=f,=f,r",
            [code],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _plus_2_25(code, FAST: tl.constexpr):
    """2^25 + 4 code (uint8), fp32, in the same way."""
    if FAST:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x4C000000, 0x7650; prmt.b32 $1, $4, 0x4C000000, 0x7651;"
            " prmt.b32 $2, $4, 0x4C000000, 0x7652; prmt.b32 $3, $4, 0x4C000000, 0x7653;",
            "=f,=f,=f,=f,r",
            [code],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    return (code.to(tl.int32) | 0x4C000000).to(tl.float32, bitcast=True)


@triton.jit
def decode_signed_8bit(code, slope, offset, FAST: tl.constexpr):
    """Value of a code (uint8) of the signed 8-bit map; slope, offset: lane tables. To 3 ulp."""
    f = _plus_2_25(code, FAST) - 33554940.0  # 4 (code - 127)
    exponent = f.to(tl.int32, bitcast=True) >> 23
    value = tl.abs(f) * from_lane(slope, exponent, FAST) + from_lane(offset, exponent, FAST)
    sign = f.to(tl.int32, bitcast=True) & -2147483648
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_unsigned_8bit(code, power, FAST: tl.constexpr):
    """Value of a code (uint8) of the unsigned 8-bit map; power: lane table. To 4 ulp."""
    f = (_plus_2_23(code, FAST) - 8388606.5).to(tl.int32, bitcast=True)  # code + 1.5
    mantissa = ((f & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return from_lane(power, f >> 23, FAST) * (mantissa - 0.8888888955116272)


@triton.jit
def decode_linear(code):
    """Value of the unsigned 4-bit map: (code + 1) / 16, fp32."""
    return code.to(tl.float32) * 0.0625 + 0.0625


@triton.jit
def encode_e4m3(y, NATIVE: tl.constexpr):
    """Bits of y (fp32, |y| <= 448 up to rounding) in E4M3, to nearest, ties to even. uint8."""
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: round to 3 mantissa bits and move the exponent's bias from 127 to 7. Subnormal (below 2^-6): adding 2^14
    # lets the addition itself round to multiples of 2^-9.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, tl.minimum(normal, 126))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """Value of an E4M3 code (uint8, not NaN), fp32."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120 moves the bias back


@triton.jit
def fast_sqrt(x, FAST: tl.constexpr):
    """sqrt(x) to 2 ulp; 0 below the least normal number."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt(x)


@triton.jit
def fast_reciprocal(x, FAST: tl.constexpr):
    """1 / x to 1 ulp; 0 beyond 2^126."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x
