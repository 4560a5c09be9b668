"""The three Triton kernels of a step: `prepare`, `step_blocks` (quantized states), `step_plain` (fp32 states).

A launch covers all tensors of a call. Where they lie stands in two device arrays (table_triton.py builds them): `table`
int64 [tensors, COLUMNS], addresses and sizes, and `grads` int64 [tensors], addresses alone, since they move at every
step. A program finds its tensor in `chunk_tensor` and loops over one chunk, tile by tile. No scalar is baked in: what
changes from step to step stands in `scalars` fp32 [tensors, SCALARS], which `prepare` writes first (it also advances
the step counts, in a launch of its own because all chunks of a tensor read the count).

Shapes: a tile is [TILE_ROWS, BLOCK], a row is one quantization block, BLOCK the block size rounded up to a
power of two.
"""

import triton
import triton.language as tl

from halfbyte.optim.kernels.codec_triton import (
    decode_e4m3,
    decode_linear,
    encode_by_line,
    encode_e4m3,
    encode_linear,
    fast_reciprocal,
    fast_sqrt,
    look_up,
    look_up_two,
    widen,
)

COLUMNS = tl.constexpr(16)
PARAM = tl.constexpr(0)
EXP_AVG = tl.constexpr(1)  # a moment's codes (or fp32 values), and its scales beside them
EXP_AVG_SQ = tl.constexpr(3)
MAX_EXP_AVG_SQ = tl.constexpr(5)
STEP = tl.constexpr(7)
NUMEL = tl.constexpr(8)
FIRST_CHUNK = tl.constexpr(9)
SEED = tl.constexpr(10)
OFFSET = tl.constexpr(11)
INNER = tl.constexpr(12)
OUTER = tl.constexpr(13)

SCALARS = tl.constexpr(16)
GRAD_FACTOR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
ONE_MINUS_BETA1 = tl.constexpr(2)
BETA2 = tl.constexpr(3)
ONE_MINUS_BETA2 = tl.constexpr(4)
ROOT_FACTOR = tl.constexpr(5)  # 1 / sqrt(1 - beta2^step)
STEP_SIZE = tl.constexpr(6)  # lr / (1 - beta1^step)
DECAY = tl.constexpr(7)  # 1 - lr * weight_decay
EPS = tl.constexpr(8)
WEIGHT_DECAY = tl.constexpr(9)
KEY = tl.constexpr(10)  # rounding.step_key, as bits
MULTIPLY = tl.constexpr(11)

SCALE_MIN = tl.constexpr(1e-30)
UNSIGNED_LIMIT = tl.constexpr(256.0)  # codec_triton.UNSIGNED_LIMIT


@triton.jit
def _fmix32(x):
    """MurmurHash3's finalizer; x uint32 (see halfbyte.optim.rounding)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _power(base, exponent):
    """base^exponent in fp64 by squaring; exponent int32 >= 0. tl.exp and tl.log would link a library."""
    power = tl.full(exponent.shape, 1.0, tl.float64)
    for _ in range(25):  # a step count is exact in fp32 up to 2^24
        power = tl.where((exponent & 1) != 0, power * base, power)
        base = base * base
        exponent = exponent >> 1
    return power


@triton.jit(
    do_not_specialize=["num_tensors"],
    do_not_specialize_on_alignment=["lr_at", "beta1_at", "beta2_at", "grad_scale_at", "found_inf_at"],
)
def prepare(
    table, scalars, num_tensors, lr, beta1, beta1_rest, beta2, beta2_rest, eps, weight_decay,
    lr_at, beta1_at, beta2_at, grad_scale_at, found_inf_at,
    LR_IS_TENSOR: tl.constexpr, BETA1_IS_TENSOR: tl.constexpr, BETA2_IS_TENSOR: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr, MAXIMIZE: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """Advance every step count and write every tensor's scalars, in fp64 where beta^step needs it."""
    if HAS_FOUND_INF:  # noqa: SIM102 - a compile-time condition stands alone
        if tl.load(found_inf_at) != 0.0:
            return
    i = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    mask = i < num_tensors
    row = table + i * COLUMNS
    step_at = tl.load(row + STEP, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=mask, other=0.0) + 1.0
    tl.store(step_at, step, mask=mask)

    grad_factor = 1.0
    if HAS_GRAD_SCALE:
        grad_factor = 1.0 / tl.load(grad_scale_at)
    if MAXIMIZE:
        grad_factor = -grad_factor
    if LR_IS_TENSOR:
        lr = tl.load(lr_at)
    zero = tl.zeros([TENSORS], tl.float64)
    exact1 = zero + beta1 + beta1_rest
    exact2 = zero + beta2 + beta2_rest
    if BETA1_IS_TENSOR:
        exact1 = zero + tl.load(beta1_at)
    if BETA2_IS_TENSOR:
        exact2 = zero + tl.load(beta2_at)
    correction1 = (1.0 - _power(exact1, step.to(tl.int32))).to(tl.float32)
    correction2 = (1.0 - _power(exact2, step.to(tl.int32))).to(tl.float32)
    seed = tl.load(row + SEED, mask=mask, other=0).to(tl.uint32)
    key = _fmix32(seed ^ _fmix32(step.to(tl.uint32)))
    multiply = _fmix32(key + 0x9E3779B9) | 1

    out = scalars + i * SCALARS
    none = tl.zeros([TENSORS], tl.float32)
    tl.store(out + GRAD_FACTOR, none + grad_factor, mask=mask)
    tl.store(out + BETA1, exact1.to(tl.float32), mask=mask)
    tl.store(out + ONE_MINUS_BETA1, (1.0 - exact1).to(tl.float32), mask=mask)
    tl.store(out + BETA2, exact2.to(tl.float32), mask=mask)
    tl.store(out + ONE_MINUS_BETA2, (1.0 - exact2).to(tl.float32), mask=mask)
    tl.store(out + ROOT_FACTOR, 1.0 / tl.sqrt(correction2), mask=mask)
    tl.store(out + STEP_SIZE, lr / correction1, mask=mask)
    tl.store(out + DECAY, none + (1.0 - lr * weight_decay), mask=mask)
    tl.store(out + EPS, none + eps, mask=mask)
    tl.store(out + WEIGHT_DECAY, none + weight_decay, mask=mask)
    tl.store(out + KEY, key.to(tl.float32, bitcast=True), mask=mask)
    tl.store(out + MULTIPLY, multiply.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column of a table row, as a pointer."""
    at = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        at = tl.multiple_of(at, 16)  # on the pointer: the cast forgets what was known of the integer
    return at


@triton.jit
def _hyper(s):
    """What a tensor's values need, loaded once: (beta1, 1 - beta1, beta2, 1 - beta2, ..., key, multiply)."""
    return (
        tl.load(s + GRAD_FACTOR),
        tl.load(s + BETA1),
        tl.load(s + ONE_MINUS_BETA1),
        tl.load(s + BETA2),
        tl.load(s + ONE_MINUS_BETA2),
        tl.load(s + ROOT_FACTOR),
        tl.load(s + STEP_SIZE),
        tl.load(s + DECAY),
        tl.load(s + EPS),
        tl.load(s + WEIGHT_DECAY),
        tl.load(s + KEY).to(tl.uint32, bitcast=True),
        tl.load(s + MULTIPLY).to(tl.uint32, bitcast=True),
    )


@triton.jit
def _adam(param, grad, m, v, d, hyper, AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr, FAST: tl.constexpr):
    """Adam's formula in fp32: (new parameter, exp_avg, exp_avg_sq, max_exp_avg_sq).

    m, v    beta1 * exp_avg, beta2 * exp_avg_sq: the factor was part of the scale.
    grad    grad_factor included.
    """
    if DECOUPLED:
        param = param * hyper[DECAY]
    else:
        grad = grad + hyper[WEIGHT_DECAY] * param
    m = m + grad * hyper[ONE_MINUS_BETA1]
    v = v + (grad * grad) * hyper[ONE_MINUS_BETA2]
    if AMSGRAD:
        d = tl.maximum(d, v, propagate_nan=tl.PropagateNan.ALL)
    else:
        d = v
    denominator = fast_sqrt(d, FAST) * hyper[ROOT_FACTOR] + hyper[EPS]
    param = param - hyper[STEP_SIZE] * (m * fast_reciprocal(denominator, FAST))
    return param, m, v, d


@triton.jit
def _round_bits(x, add):
    """fp32 -> bf16: the upper half of x's bits plus `add` (uint32 below 2^16); NaN and Inf as they are."""
    bits = x.to(tl.uint32, bitcast=True)
    special = (bits & 0x7F800000) == 0x7F800000
    return (tl.where(special, bits, bits + add) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _round(x, index, row, hyper, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr, FAST: tl.constexpr):
    """fp32 -> DTYPE; stochastically (halfbyte.optim.rounding) by each element's local index (int64)."""
    if STOCHASTIC:
        if not FLAT:
            inner = tl.load(row + INNER)
            index = index // inner * tl.load(row + OUTER) + index % inner
        index += tl.load(row + OFFSET)
        high = (index >> 32).to(tl.uint32)
        rounded = _round_bits(
            x, _fmix32(index.to(tl.uint32) * hyper[MULTIPLY] + hyper[KEY] + high * 0x85EBCA6B) & 0xFFFF
        )
    elif DTYPE == tl.bfloat16 and not FAST:  # noqa: SIM300 - the interpreter's own cast truncates
        rounded = _round_bits(x, 0x7FFF + ((x.to(tl.uint32, bitcast=True) >> 16) & 1))
    else:
        rounded = x.to(DTYPE)
    return rounded


@triton.jit
def _load_tile(first_row, numel, params, grads, m_codes, m_scales, v_codes, v_scales,
               FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """What a tile reads: gradient, parameter [TILE_ROWS, BLOCK], and of each moment codes and scales."""
    PER_BYTE: tl.constexpr = 2 if FMT == "4bit" else 1
    r = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)
    code_column = tl.arange(0, BLOCK // PER_BYTE)
    start = first_row * BLOCK_SIZE
    at = r[:, None] * BLOCK_SIZE + column[None, :]
    code_at = r[:, None] * (BLOCK_SIZE // PER_BYTE) + code_column[None, :]
    code_start = start // PER_BYTE
    if MASKED:
        left = numel - start
        mask = (at < left) & (column < BLOCK_SIZE)[None, :]
        code_mask = (code_at * PER_BYTE < left) & (code_column * PER_BYTE < BLOCK_SIZE)[None, :]
        row_mask = r * BLOCK_SIZE < left
        grad = tl.load(grads + start + at, mask=mask, other=0.0)
        param = tl.load(params + start + at, mask=mask, other=0.0)
        m_code = tl.load(m_codes + code_start + code_at, mask=code_mask, other=0)
        v_code = tl.load(v_codes + code_start + code_at, mask=code_mask, other=0)
        m_scale = tl.load(m_scales + first_row + r, mask=row_mask, other=0.0)
        v_scale = tl.load(v_scales + first_row + r, mask=row_mask, other=0.0)
    else:
        grad = tl.load(grads + start + at)
        param = tl.load(params + start + at)
        m_code = tl.load(m_codes + code_start + code_at)
        v_code = tl.load(v_codes + code_start + code_at)
        m_scale = tl.load(m_scales + first_row + r)
        v_scale = tl.load(v_scales + first_row + r)
    return grad, param, m_code, m_scale, v_code, v_scale


@triton.jit
def _decode_moment(code, scale, low, high, FMT: tl.constexpr, SIGNED: tl.constexpr, NATIVE_E4M3: tl.constexpr,
                   TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr, PAIR_V: tl.constexpr):  # fmt: skip
    """fp32 [TILE_ROWS, BLOCK] of a tile's codes; scale [TILE_ROWS] times what else belongs to it."""
    if FMT == "fp8":
        value = decode_e4m3(code, NATIVE_E4M3)
    elif FMT == "8bit":
        value = look_up(low, high, code.to(tl.int32), FAST)
    elif SIGNED or PAIR_V:
        even, odd = look_up_two(low, high, code.to(tl.int32), FAST)
        value = tl.reshape(tl.join(even, odd), [TILE_ROWS, BLOCK])
    else:
        value = decode_linear(tl.reshape(tl.join(code >> 4, code & 15), [TILE_ROWS, BLOCK]))
    return value * scale[:, None]


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _repair(x, ok, LEAST: tl.constexpr):
    """(unsigned moment, its blocks' largest) where elements not `ok` count as the largest, and no positive one as 0."""
    x = tl.where(ok, x, 0.0)
    amax = tl.maximum(tl.max(x, axis=1), SCALE_MIN)
    x = tl.where(x > 0.0, tl.maximum(x, (amax * LEAST)[:, None]), 0.0)
    return tl.where(ok, x, amax[:, None]), amax


@triton.jit
def _store_moment(x, amax, codes, scales, low, high, r, code_at, row_mask, code_mask, mask,
                  FMT: tl.constexpr, SIGNED: tl.constexpr, STRETCH: tl.constexpr, BIN_BITS: tl.constexpr,
                  MASKED: tl.constexpr, NATIVE_E4M3: tl.constexpr,
                  TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Encode and store a tile of one moment, finite, given its blocks' largest magnitudes."""
    scale = tl.maximum(amax, SCALE_MIN)
    if FMT == "fp8":
        scale = scale / 448.0
        y = x * (1.0 / scale)[:, None]
        if not SIGNED:
            y = tl.where(x > 0.0, tl.maximum(y, 0.001953125), 0.0)  # rule 1: at least the least code, 2^-9
        code = encode_e4m3(y, NATIVE_E4M3)
    else:
        y = x * (STRETCH / scale)[:, None]
        if FMT == "4bit" and not SIGNED:
            code = encode_linear(y, FAST)
        else:
            code = encode_by_line(y, low, high, BIN_BITS, FAST)
    code = code.to(tl.uint8)
    if FMT == "4bit":
        if MASKED:
            code = tl.where(mask, code, 0)
        high, low = tl.split(tl.reshape(code, [TILE_ROWS, BLOCK // 2, 2]))
        code = (high << 4) | low
    if MASKED:
        tl.store(codes + code_at, code, mask=code_mask)
        tl.store(scales + r, scale, mask=row_mask)
    else:
        tl.store(codes + code_at, code)
        tl.store(scales + r, scale)


@triton.jit
def _step_tile(
    first_row, grad, param, m_code, m_scale, v_code, v_scale, numel, row, params, m_codes, m_scales, v_codes, v_scales, d_codes, d_scales, hyper,
    halves,
    P: tl.constexpr, FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, MASKED: tl.constexpr, AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
    STRETCH_M: tl.constexpr, BITS_M: tl.constexpr, STRETCH_V: tl.constexpr, BITS_V: tl.constexpr,
    HAS_GRAD_FACTOR: tl.constexpr, FAST: tl.constexpr, PAIR_V: tl.constexpr,
):  # fmt: skip
    """Step the blocks first_row .. first_row + TILE_ROWS of one tensor (int64), given what `_load_tile` read.

    MASKED: some values of the tile do not exist.
    """
    PER_BYTE: tl.constexpr = 2 if FMT == "4bit" else 1
    r = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, BLOCK)
    at = r[:, None] * BLOCK_SIZE + column[None, :]
    code_column = tl.arange(0, BLOCK // PER_BYTE)
    code_at = r[:, None] * (BLOCK_SIZE // PER_BYTE) + code_column[None, :]
    start = first_row * BLOCK_SIZE
    left = numel - start
    row_mask = r * BLOCK_SIZE < left
    mask = (at < left) & (column < BLOCK_SIZE)[None, :]
    code_mask = (code_at * PER_BYTE < left) & (code_column * PER_BYTE < BLOCK_SIZE)[None, :]

    params += start
    m_codes += start // PER_BYTE
    v_codes += start // PER_BYTE
    m_scales += first_row
    v_scales += first_row
    m = _decode_moment(m_code, m_scale * hyper[BETA1], halves[0], halves[4],
                       FMT, True, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST, PAIR_V)  # fmt: skip
    v = _decode_moment(v_code, v_scale * hyper[BETA2], halves[1], halves[4],
                       FMT, False, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST, PAIR_V)  # fmt: skip
    d = v
    if AMSGRAD:
        d_codes += start // PER_BYTE
        d_scales += first_row
        d_code = tl.load(d_codes + code_at, mask=code_mask, other=0)
        d_scale = tl.load(d_scales + r, mask=row_mask, other=0.0)
        d = _decode_moment(d_code, d_scale, halves[1], halves[4],
                           FMT, False, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST, PAIR_V)  # fmt: skip

    grad = widen(grad, FAST)
    if HAS_GRAD_FACTOR:
        grad = grad * hyper[GRAD_FACTOR]
    param, m, v, d = _adam(widen(param, FAST), grad, m, v, d, hyper, AMSGRAD, DECOUPLED, FAST)

    param = _round(param, start + at, row, hyper, P, STOCHASTIC, FLAT, FAST)
    if MASKED:
        tl.store(params + at, param, mask=mask)
        m = tl.where(mask, m, 0.0)
        v = tl.where(mask, v, 0.0)
        d = tl.where(mask, d, 0.0)
    else:
        tl.store(params + at, param)

    v_amax = tl.reduce(v, 1, _greater)
    d_amax = v_amax
    if AMSGRAD:
        d_amax = tl.reduce(d, 1, _greater)
    # One test a tile instead of three selections a value: not finite (m and d are finite where v is), or very large.
    if tl.max((d_amax <= UNSIGNED_LIMIT).to(tl.int32) ^ 1, axis=0) != 0:
        ok = v < float("inf")
        m = tl.where(ok, m, 0.0)
        v, v_amax = _repair(v, ok, 7.888609052210118e-31)  # 2^-100
        if AMSGRAD:
            d, d_amax = _repair(d, ok, 7.888609052210118e-31)
    m_amax = tl.max(tl.abs(m), axis=1)
    _store_moment(m, m_amax, m_codes, m_scales, halves[2], halves[4], r, code_at, row_mask, code_mask,
                  mask, FMT, True, STRETCH_M, BITS_M, MASKED, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST)  # fmt: skip
    _store_moment(v, v_amax, v_codes, v_scales, halves[3], halves[4], r, code_at, row_mask, code_mask,
                  mask, FMT, False, STRETCH_V, BITS_V, MASKED, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST)  # fmt: skip
    if AMSGRAD:
        _store_moment(d, d_amax, d_codes, d_scales, halves[3], halves[4], r, code_at, row_mask, code_mask,
                      mask, FMT, False, STRETCH_V, BITS_V, MASKED, NATIVE_E4M3, TILE_ROWS, BLOCK, FAST)  # fmt: skip


@triton.jit(do_not_specialize=["chunk_tiles"], do_not_specialize_on_alignment=["found_inf_at"])
def step_blocks(
    table, grads, scalars, chunk_tensor, chunk_tiles, found_inf_at, codec,
    HAS_FOUND_INF: tl.constexpr, TAILS: tl.constexpr, ALIGNED: tl.constexpr, G: tl.constexpr,
    P: tl.constexpr, FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr, AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
    STRETCH_M: tl.constexpr, BITS_M: tl.constexpr, STRETCH_V: tl.constexpr, BITS_V: tl.constexpr,
    HAS_GRAD_FACTOR: tl.constexpr, FAST: tl.constexpr, PAIR_V: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """One program steps one chunk, `chunk_tiles` whole tiles of a quantized tensor; or (TAILS) its last, partial tile.

    Two launches, because the masks of a partial tile take so many registers that half the warps would fit.
    """
    if HAS_FOUND_INF:  # noqa: SIM102 - a compile-time condition stands alone
        if tl.load(found_inf_at) != 0.0:
            return
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    row = table + tensor.to(tl.int64) * COLUMNS
    hyper = _hyper(scalars + tensor * SCALARS)
    grad_at = _address(grads + tensor, 0, G, ALIGNED)
    param_at = _address(row, PARAM, P, ALIGNED)
    m_codes = _address(row, EXP_AVG, tl.uint8, ALIGNED)
    m_scales = _address(row, EXP_AVG + 1, tl.float32, ALIGNED)
    v_codes = _address(row, EXP_AVG_SQ, tl.uint8, ALIGNED)
    v_scales = _address(row, EXP_AVG_SQ + 1, tl.float32, ALIGNED)
    d_codes, d_scales = v_codes, v_scales
    if AMSGRAD:
        d_codes = _address(row, MAX_EXP_AVG_SQ, tl.uint8, ALIGNED)
        d_scales = _address(row, MAX_EXP_AVG_SQ + 1, tl.float32, ALIGNED)
    halves = (tl.load(codec), tl.load(codec + 1), tl.load(codec + 2), tl.load(codec + 3), tl.load(codec + 4))
    numel = tl.load(row + NUMEL)
    num_tiles = numel // (TILE_ROWS * BLOCK_SIZE)
    if TAILS:
        begin = num_tiles
        count = 1
    else:
        begin = (pid - tl.load(row + FIRST_CHUNK)) * chunk_tiles
        count = tl.minimum(chunk_tiles, num_tiles - begin).to(tl.int32)
    MASKED: tl.constexpr = TAILS or BLOCK != BLOCK_SIZE
    if PREFETCH:
        grad, param, m_code, m_scale, v_code, v_scale = _load_tile(
            begin * TILE_ROWS, numel, param_at, grad_at, m_codes, m_scales, v_codes, v_scales,
            FMT, BLOCK_SIZE, BLOCK, TILE_ROWS, MASKED)  # fmt: skip
    for i in range(count):
        if PREFETCH:
            next_grad, next_param, next_m_code, next_m_scale, next_v_code, next_v_scale = _load_tile(
                (begin + tl.minimum(i + 1, count - 1)) * TILE_ROWS, numel, param_at, grad_at,
                m_codes, m_scales, v_codes, v_scales, FMT, BLOCK_SIZE, BLOCK, TILE_ROWS, MASKED)  # fmt: skip
        else:
            grad, param, m_code, m_scale, v_code, v_scale = _load_tile(
                (begin + i) * TILE_ROWS, numel, param_at, grad_at, m_codes, m_scales, v_codes, v_scales,
                FMT, BLOCK_SIZE, BLOCK, TILE_ROWS, MASKED)  # fmt: skip
        _step_tile((begin + i) * TILE_ROWS, grad, param, m_code, m_scale, v_code, v_scale, numel, row, param_at,
                   m_codes, m_scales, v_codes, v_scales, d_codes, d_scales, hyper, halves,
                   P, FMT, BLOCK_SIZE, BLOCK, TILE_ROWS, MASKED, AMSGRAD, DECOUPLED, STOCHASTIC, FLAT,
                   NATIVE_E4M3, STRETCH_M, BITS_M, STRETCH_V, BITS_V, HAS_GRAD_FACTOR, FAST, PAIR_V)  # fmt: skip
        if PREFETCH:
            grad, param, m_code, m_scale, v_code, v_scale = (
                next_grad, next_param, next_m_code, next_m_scale, next_v_code, next_v_scale
            )  # fmt: skip


@triton.jit(do_not_specialize=["chunk_tiles"], do_not_specialize_on_alignment=["found_inf_at"])
def step_plain(
    table, grads, scalars, chunk_tensor, chunk_tiles, found_inf_at,
    HAS_FOUND_INF: tl.constexpr, P: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One program steps `chunk_tiles` tiles of a tensor whose states are fp32 (usually a small one)."""
    if HAS_FOUND_INF:  # noqa: SIM102 - a compile-time condition stands alone
        if tl.load(found_inf_at) != 0.0:
            return
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    row = table + tensor.to(tl.int64) * COLUMNS
    hyper = _hyper(scalars + tensor * SCALARS)
    begin = (pid - tl.load(row + FIRST_CHUNK)) * chunk_tiles * TILE
    end = tl.minimum(begin + chunk_tiles * TILE, tl.load(row + NUMEL))
    grad_at = _address(grads + tensor, 0, G, False)
    param_at = _address(row, PARAM, P, False)
    m_at = _address(row, EXP_AVG, tl.float32, False)
    v_at = _address(row, EXP_AVG_SQ, tl.float32, False)
    d_at = v_at
    if AMSGRAD:
        d_at = _address(row, MAX_EXP_AVG_SQ, tl.float32, False)
    for i in range(((end - begin + TILE - 1) // TILE).to(tl.int32)):
        at = begin + i * TILE + tl.arange(0, TILE)
        mask = at < end
        grad = tl.load(grad_at + at, mask=mask, other=0.0).to(tl.float32) * hyper[GRAD_FACTOR]
        param = tl.load(param_at + at, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(m_at + at, mask=mask, other=0.0) * hyper[BETA1]
        v = tl.load(v_at + at, mask=mask, other=0.0) * hyper[BETA2]
        d = v
        if AMSGRAD:
            d = tl.load(d_at + at, mask=mask, other=0.0)
        param, m, v, d = _adam(param, grad, m, v, d, hyper, AMSGRAD, DECOUPLED, FAST)
        tl.store(param_at + at, _round(param, at, row, hyper, P, STOCHASTIC, FLAT, FAST), mask=mask)
        tl.store(m_at + at, m, mask=mask)
        tl.store(v_at + at, v, mask=mask)
        if AMSGRAD:
            tl.store(d_at + at, d, mask=mask)
