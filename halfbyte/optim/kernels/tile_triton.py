"""One tile of the fused step: what is read, Adam's formula, and what is written.

A tile is [FOLD, TILE_ROWS * WIDTH]: TILE_ROWS quantization blocks of BLOCK_SIZE values (padded to a power of two), each
cut into FOLD pieces of WIDTH; dimension 1 runs through the first pieces of all blocks, then comes a row of second ones.
So a thread holds values of all pieces, a block's largest value takes fewer shuffles, and fewer threads work out its
scale. Rejected: [TILE_ROWS, FOLD, WIDTH], where Triton 3.6 gives a thread both pieces and Triton 3.9 does not. All
arithmetic is fp32.

`hyper` is scalars_triton.load_hyper's tuple; `codec` a tuple of six lane or table handles and the upper half of the
tables' addresses, see `load_codec`.
"""

import triton
import triton.language as tl

from halfbyte.optim.kernels.codec_triton import (
    decode_e4m3,
    decode_linear,
    decode_signed_8bit,
    decode_unsigned_8bit,
    encode_by_line,
    encode_e4m3,
    encode_linear,
    fast_reciprocal,
    fast_sqrt,
    from_lane,
    load_lane,
    look_up,
    widen,
)
from halfbyte.optim.kernels.scalars_triton import (
    BETA1,
    BETA2,
    DECAY,
    EPS,
    GRAD_FACTOR,
    INNER,
    KEY,
    MULTIPLY,
    OFFSET,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    OUTER,
    ROOT_FACTOR,
    STEP_SIZE,
    WEIGHT_DECAY,
    fmix32,
)

SCALE_MIN = tl.constexpr(1e-30)
UNSIGNED_LIMIT = tl.constexpr(256.0)  # codec_triton.UNSIGNED_LIMIT
LEAST_SHARE = tl.constexpr(2.0**-100)


@triton.jit
def load_codec(halves, FAST: tl.constexpr):
    """(exp_avg's two lane tables, exp_avg_sq's first one, and halves of addresses: the codebooks and the lines)."""
    high = tl.load(halves + 6)
    m_lanes = tl.load(halves)
    v_lanes = tl.load(halves + 3)
    return (
        load_lane(m_lanes, high, FAST),
        load_lane(m_lanes + 128, high, FAST),  # bytes: the second row
        load_lane(v_lanes, high, FAST),
        tl.load(halves + 1),
        tl.load(halves + 2),
        tl.load(halves + 4),
        tl.load(halves + 5),
        high,
    )


@triton.jit
def load_tile(first_row, numel, params, grads, m_codes, m_scales, v_codes, v_scales,
              FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr,
              WIDTH: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """What a tile reads: gradient, parameter [FOLD, TILE_ROWS * WIDTH], and of each moment codes and scales."""
    PER_BYTE: tl.constexpr = 2 if FMT == "4bit" else 1
    start = first_row * BLOCK_SIZE
    at = value_offsets(BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, 1)
    code_at = value_offsets(BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, PER_BYTE)
    r = tl.arange(0, TILE_ROWS)
    if MASKED:
        left = numel - start
        mask = value_mask(left, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, 1)
        code_mask = value_mask(left, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, PER_BYTE)
        row_mask = r * BLOCK_SIZE < left
        grad = tl.load(grads + start + at, mask=mask, other=0.0)
        param = tl.load(params + start + at, mask=mask, other=0.0)
        m_code = tl.load(m_codes + start // PER_BYTE + code_at, mask=code_mask, other=0)
        v_code = tl.load(v_codes + start // PER_BYTE + code_at, mask=code_mask, other=0)
        m_scale = tl.load(m_scales + first_row + r, mask=row_mask, other=0.0)
        v_scale = tl.load(v_scales + first_row + r, mask=row_mask, other=0.0)
    else:
        grad = tl.load(grads + start + at)
        param = tl.load(params + start + at)
        m_code = tl.load(m_codes + start // PER_BYTE + code_at)
        v_code = tl.load(v_codes + start // PER_BYTE + code_at)
        m_scale = tl.load(m_scales + first_row + r)
        v_scale = tl.load(v_scales + first_row + r)
    return grad, param, m_code, m_scale, v_code, v_scale


@triton.jit
def value_offsets(BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
                  PER_BYTE: tl.constexpr):  # fmt: skip
    """Offset of each value of a tile, or (PER_BYTE = 2) of each byte of 4-bit codes: int32."""
    NUM: tl.constexpr = WIDTH // PER_BYTE
    i = tl.arange(0, TILE_ROWS * NUM)[None, :]
    return i // NUM * (BLOCK_SIZE // PER_BYTE) + tl.arange(0, FOLD)[:, None] * NUM + i % NUM


@triton.jit
def value_mask(left, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
               PER_BYTE: tl.constexpr):  # fmt: skip
    """Which of them exist, when `left` values do from the tile's start on."""
    NUM: tl.constexpr = WIDTH // PER_BYTE
    i = tl.arange(0, TILE_ROWS * NUM)[None, :]
    in_block = tl.arange(0, FOLD)[:, None] * WIDTH + i % NUM * PER_BYTE
    return (in_block < BLOCK_SIZE) & (i // NUM * BLOCK_SIZE + in_block < left)


@triton.jit
def by_row(x, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A number a row -> [1, TILE_ROWS * WIDTH]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [TILE_ROWS, WIDTH]), [1, TILE_ROWS * WIDTH])


@triton.jit
def adam(param, grad, m, v, d, hyper, AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr, TINY_EPS: tl.constexpr,
         FAST: tl.constexpr):  # fmt: skip
    """Adam's formula in fp32: (new parameter, exp_avg, exp_avg_sq, max_exp_avg_sq).

    m, v    beta1 * exp_avg, beta2 * exp_avg_sq: the factor was part of the scale.
    grad    grad_factor included.
    TINY_EPS  eps does not hide that the square root is 0 below the least normal number, so that counts as that number.
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
    square = d
    if TINY_EPS:
        square = tl.maximum(d, 1.1754943508222875e-38)
    denominator = fast_sqrt(square, FAST) * hyper[ROOT_FACTOR] + hyper[EPS]
    param = param - hyper[STEP_SIZE] * (m * fast_reciprocal(denominator, FAST))
    return param, m, v, d


@triton.jit
def _round_bits(x, add):
    """fp32 -> bf16: the upper half of x's bits plus `add` (uint32 below 2^16); NaN and Inf as they are."""
    bits = x.to(tl.uint32, bitcast=True)
    special = (bits & 0x7F800000) == 0x7F800000
    return (tl.where(special, bits, bits + add) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_to(x, index, row, hyper, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr,
             FAST: tl.constexpr):  # fmt: skip
    """fp32 -> DTYPE; stochastically (halfbyte.optim.rounding) by each element's local index (int64)."""
    if STOCHASTIC:
        if not FLAT:
            inner = tl.load(row + INNER)
            index = index // inner * tl.load(row + OUTER) + index % inner
        index += tl.load(row + OFFSET)
        high = (index >> 32).to(tl.uint32)
        hashed = fmix32(index.to(tl.uint32) * hyper[MULTIPLY] + hyper[KEY] + high * 0x85EBCA6B)
        rounded = _round_bits(x, hashed & 0xFFFF)
    elif DTYPE == tl.bfloat16 and not FAST:  # noqa: SIM300 - the interpreter's own cast truncates
        rounded = _round_bits(x, 0x7FFF + ((x.to(tl.uint32, bitcast=True) >> 16) & 1))
    else:
        rounded = x.to(DTYPE)
    return rounded


@triton.jit
def _split_codes(code, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Bytes of two 4-bit codes -> codes [FOLD, TILE_ROWS * WIDTH], the upper half first."""
    return tl.reshape(tl.join(code >> 4, code & 15), [FOLD, TILE_ROWS * WIDTH])


@triton.jit
def _decode_m(code, scale, codec, FMT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
              FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr,
              LANES: tl.constexpr):  # fmt: skip
    """exp_avg times whatever `scale` [TILE_ROWS] holds beside the scale."""
    if FMT == "fp8":
        value = decode_e4m3(code, NATIVE_E4M3)
    elif FMT == "4bit":
        code = _split_codes(code, FOLD, TILE_ROWS, WIDTH).to(tl.int32)
        value = from_lane(codec[0], code, FAST)
    elif LANES:
        value = decode_signed_8bit(code, codec[0], codec[1], FAST)
    else:
        value = look_up(codec[3], codec[7], code.to(tl.int32), FAST)
    return value * by_row(scale, TILE_ROWS, WIDTH)


@triton.jit
def _decode_v(code, scale, codec, FMT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
              FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr,
              LANES: tl.constexpr):  # fmt: skip
    """exp_avg_sq or max_exp_avg_sq, as `_decode_m`."""
    if FMT == "fp8":
        value = decode_e4m3(code, NATIVE_E4M3)
    elif FMT == "4bit":
        value = decode_linear(_split_codes(code, FOLD, TILE_ROWS, WIDTH))
    elif LANES:
        value = decode_unsigned_8bit(code, codec[2], FAST)
    else:
        value = look_up(codec[5], codec[7], code.to(tl.int32), FAST)
    return value * by_row(scale, TILE_ROWS, WIDTH)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amax(x, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest of each block: [FOLD, TILE_ROWS * WIDTH] -> [TILE_ROWS]; NaN if the block holds one."""
    return tl.reduce(tl.reshape(tl.reduce(x, 0, _greater), [TILE_ROWS, WIDTH]), 1, _greater)


@triton.jit
def _repair(x, ok, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(unsigned moment, its blocks' largest) where elements not `ok` count as the largest, and no positive one as 0."""
    x = tl.where(ok, x, 0.0)
    amax = tl.maximum(block_amax(x, TILE_ROWS, WIDTH), SCALE_MIN)
    x = tl.where(x > 0.0, tl.maximum(x, by_row(amax * LEAST_SHARE, TILE_ROWS, WIDTH)), 0.0)
    return tl.where(ok, x, by_row(amax, TILE_ROWS, WIDTH)), amax


@triton.jit
def _store_moment(x, amax, codes, scales, lines, high, code_at, code_mask, row_mask, mask,
                  FMT: tl.constexpr, SIGNED: tl.constexpr, STRETCH: tl.constexpr, BIN_BITS: tl.constexpr,
                  MASKED: tl.constexpr, NATIVE_E4M3: tl.constexpr,
                  FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Encode and store a tile of one moment, finite, given its blocks' largest magnitudes."""
    r = tl.arange(0, TILE_ROWS)
    scale = tl.maximum(amax, SCALE_MIN)
    if FMT == "fp8":
        scale = scale * 0.002232142857142857  # 1 / 448
        y = x * by_row(fast_reciprocal(scale, FAST), TILE_ROWS, WIDTH)
        if not SIGNED:
            y = tl.where(x > 0.0, tl.maximum(y, 0.001953125), 0.0)  # rule 1: at least the least code, 2^-9
        code = encode_e4m3(y, NATIVE_E4M3)
    else:
        y = x * by_row(fast_reciprocal(scale, FAST) * STRETCH, TILE_ROWS, WIDTH)
        if FMT == "4bit" and not SIGNED:
            code = encode_linear(y, FAST)
        else:
            code = encode_by_line(y, lines, high, BIN_BITS, FAST)
    code = code.to(tl.uint8)
    if FMT == "4bit":
        if MASKED:
            code = tl.where(mask, code, 0)
        upper, lower = tl.split(tl.reshape(code, [FOLD, TILE_ROWS * WIDTH // 2, 2]))
        code = (upper << 4) | lower
    if MASKED:
        tl.store(codes + code_at, code, mask=code_mask)
        tl.store(scales + r, scale, mask=row_mask)
    else:
        tl.store(codes + code_at, code)
        tl.store(scales + r, scale)


@triton.jit
def step_tile(
    first_row, grad, param, m_code, m_scale, v_code, v_scale,
    numel, row, params, m_codes, m_scales, v_codes, v_scales, d_codes, d_scales, hyper, codec,
    P: tl.constexpr, FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr,
    TINY_EPS: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
    STRETCH_M: tl.constexpr, BITS_M: tl.constexpr, STRETCH_V: tl.constexpr, BITS_V: tl.constexpr,
    HAS_GRAD_FACTOR: tl.constexpr, FAST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Step the blocks first_row .. first_row + TILE_ROWS of one tensor (int64), given what `load_tile` read.

    MASKED: some values of the tile do not exist.
    """
    PER_BYTE: tl.constexpr = 2 if FMT == "4bit" else 1
    start = first_row * BLOCK_SIZE
    left = numel - start
    at = value_offsets(BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, 1)
    code_at = value_offsets(BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, PER_BYTE)
    mask = value_mask(left, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, 1)
    code_mask = value_mask(left, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, PER_BYTE)
    row_mask = tl.arange(0, TILE_ROWS) * BLOCK_SIZE < left

    m = _decode_m(m_code, m_scale * hyper[BETA1], codec, FMT, NATIVE_E4M3, FOLD, TILE_ROWS, WIDTH, FAST, LANES)
    v = _decode_v(v_code, v_scale * hyper[BETA2], codec, FMT, NATIVE_E4M3, FOLD, TILE_ROWS, WIDTH, FAST, LANES)
    d = v
    if AMSGRAD:
        d_codes += start // PER_BYTE
        d_scales += first_row
        d_code = tl.load(d_codes + code_at, mask=code_mask, other=0)
        d_scale = tl.load(d_scales + tl.arange(0, TILE_ROWS), mask=row_mask, other=0.0)
        d = _decode_v(d_code, d_scale, codec, FMT, NATIVE_E4M3, FOLD, TILE_ROWS, WIDTH, FAST, LANES)
    grad = widen(grad, FAST)
    if HAS_GRAD_FACTOR:
        grad = grad * hyper[GRAD_FACTOR]
    param, m, v, d = adam(widen(param, FAST), grad, m, v, d, hyper, AMSGRAD, DECOUPLED, TINY_EPS, FAST)

    param = round_to(param, start + at, row, hyper, P, STOCHASTIC, FLAT, FAST)
    if MASKED:
        tl.store(params + start + at, param, mask=mask)
        m = tl.where(mask, m, 0.0)
        v = tl.where(mask, v, 0.0)
        d = tl.where(mask, d, 0.0)
    else:
        tl.store(params + start + at, param)

    v_amax = block_amax(v, TILE_ROWS, WIDTH)
    d_amax = v_amax
    if AMSGRAD:
        d_amax = block_amax(d, TILE_ROWS, WIDTH)
    # One test a tile instead of three selections a value: not finite (m and d are finite where v is), or very large.
    if tl.max((d_amax <= UNSIGNED_LIMIT).to(tl.int32) ^ 1, axis=0) != 0:
        ok = v < float("inf")
        m = tl.where(ok, m, 0.0)
        v, v_amax = _repair(v, ok, TILE_ROWS, WIDTH)
        if AMSGRAD:
            d, d_amax = _repair(d, ok, TILE_ROWS, WIDTH)
    m_amax = block_amax(tl.abs(m), TILE_ROWS, WIDTH)
    code_start = start // PER_BYTE
    _store_moment(m, m_amax, m_codes + code_start, m_scales + first_row, codec[4], codec[7], code_at, code_mask,
                  row_mask, mask, FMT, True, STRETCH_M, BITS_M, MASKED, NATIVE_E4M3,
                  FOLD, TILE_ROWS, WIDTH, FAST)  # fmt: skip
    _store_moment(v, v_amax, v_codes + code_start, v_scales + first_row, codec[6], codec[7], code_at, code_mask,
                  row_mask, mask, FMT, False, STRETCH_V, BITS_V, MASKED, NATIVE_E4M3,
                  FOLD, TILE_ROWS, WIDTH, FAST)  # fmt: skip
    if AMSGRAD:
        _store_moment(d, d_amax, d_codes, d_scales, codec[6], codec[7], code_at, code_mask,
                      row_mask, mask, FMT, False, STRETCH_V, BITS_V, MASKED, NATIVE_E4M3,
                      FOLD, TILE_ROWS, WIDTH, FAST)  # fmt: skip
