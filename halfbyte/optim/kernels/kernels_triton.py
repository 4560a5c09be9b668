"""The Triton kernels that step values: `step_blocks` for quantized states, `step_plain` for fp32 states.

A launch covers all tensors of a call. Where they lie stands in two device arrays (table_triton.py builds them): `table`
int64 [tensors, COLUMNS], addresses and sizes, and `grads` int64 [tensors], addresses alone, since they move at every
step. A program finds its tensor in `chunk_tensor` and loops over one chunk, tile by tile. What changes from step to
step stands in `scalars` (scalars_triton.py).
"""

import triton
import triton.language as tl

from halfbyte.optim.kernels.scalars_triton import (
    BETA1,
    BETA2,
    COLUMNS,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST_CHUNK,
    GRAD_FACTOR,
    MAX_EXP_AVG_SQ,
    NUMEL,
    PARAM,
    SCALARS,
    load_hyper,
)
from halfbyte.optim.kernels.tile_triton import adam, load_codec, load_tile, round_to, step_tile


@triton.jit
def _address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a column of a table row, as a pointer; a multiple of ALIGNED bytes, if not 0.

    No more is promised of codes than a thread should load: the widest load decides the layout of the whole tile, and
    should take the 8 values that are 16 bytes of a bf16 parameter. With 16 values, two warps share a block of the FP8
    tile, and its largest value goes through one bank of shared memory: 30.8 ms where 4.2 are due.
    """
    at = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        at = tl.multiple_of(at, ALIGNED)  # on the pointer: the cast forgets what was known of the integer
    return at


@triton.jit(do_not_specialize=["chunk_tiles"], do_not_specialize_on_alignment=["found_inf_at"])
def step_blocks(
    table, grads, scalars, chunk_tensor, chunk_tiles, found_inf_at, codec_halves,
    HAS_FOUND_INF: tl.constexpr, TAILS: tl.constexpr, ALIGNED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    FMT: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    AMSGRAD: tl.constexpr, DECOUPLED: tl.constexpr, TINY_EPS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FLAT: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, STRETCH_M: tl.constexpr, BITS_M: tl.constexpr, STRETCH_V: tl.constexpr,
    BITS_V: tl.constexpr, HAS_GRAD_FACTOR: tl.constexpr, FAST: tl.constexpr, LANES: tl.constexpr,
    PREFETCH: tl.constexpr,
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
    hyper = load_hyper(scalars + tensor * SCALARS)
    codec = load_codec(codec_halves, FAST)
    WIDE: tl.constexpr = 16 if ALIGNED else 0
    CODES_ALIGNED: tl.constexpr = (4 if FMT == "4bit" else 8) if ALIGNED else 0
    grad_at = _address(grads + tensor, 0, G, WIDE)
    param_at = _address(row, PARAM, P, WIDE)
    m_codes = _address(row, EXP_AVG, tl.uint8, CODES_ALIGNED)
    m_scales = _address(row, EXP_AVG + 1, tl.float32, WIDE)
    v_codes = _address(row, EXP_AVG_SQ, tl.uint8, CODES_ALIGNED)
    v_scales = _address(row, EXP_AVG_SQ + 1, tl.float32, WIDE)
    d_codes, d_scales = v_codes, v_scales
    if AMSGRAD:
        d_codes = _address(row, MAX_EXP_AVG_SQ, tl.uint8, CODES_ALIGNED)
        d_scales = _address(row, MAX_EXP_AVG_SQ + 1, tl.float32, WIDE)
    numel = tl.load(row + NUMEL)
    num_tiles = numel // (TILE_ROWS * BLOCK_SIZE)
    if TAILS:
        begin = num_tiles
        count = 1
    else:
        begin = (pid - tl.load(row + FIRST_CHUNK)) * chunk_tiles
        count = tl.minimum(chunk_tiles, num_tiles - begin).to(tl.int32)
    MASKED: tl.constexpr = TAILS or FOLD * WIDTH != BLOCK_SIZE
    if PREFETCH:
        grad, param, m_code, m_scale, v_code, v_scale = load_tile(
            begin * TILE_ROWS, numel, param_at, grad_at, m_codes, m_scales, v_codes, v_scales,
            FMT, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, MASKED)  # fmt: skip
    for i in range(count):
        if PREFETCH:
            next_grad, next_param, next_m_code, next_m_scale, next_v_code, next_v_scale = load_tile(
                (begin + tl.minimum(i + 1, count - 1)) * TILE_ROWS, numel, param_at, grad_at,
                m_codes, m_scales, v_codes, v_scales, FMT, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, MASKED)  # fmt: skip
        else:
            grad, param, m_code, m_scale, v_code, v_scale = load_tile(
                (begin + i) * TILE_ROWS, numel, param_at, grad_at, m_codes, m_scales, v_codes, v_scales,
                FMT, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, MASKED)  # fmt: skip
        step_tile((begin + i) * TILE_ROWS, grad, param, m_code, m_scale, v_code, v_scale, numel, row, param_at,
                  m_codes, m_scales, v_codes, v_scales, d_codes, d_scales, hyper, codec,
                  P, FMT, BLOCK_SIZE, FOLD, TILE_ROWS, WIDTH, MASKED, AMSGRAD, DECOUPLED, TINY_EPS, STOCHASTIC, FLAT,
                  NATIVE_E4M3, STRETCH_M, BITS_M, STRETCH_V, BITS_V, HAS_GRAD_FACTOR, FAST, LANES)  # fmt: skip
        if PREFETCH:
            grad, param, m_code, m_scale, v_code, v_scale = (
                next_grad, next_param, next_m_code, next_m_scale, next_v_code, next_v_scale
            )  # fmt: skip


@triton.jit(do_not_specialize=["chunk_tiles"], do_not_specialize_on_alignment=["found_inf_at"])
def step_plain(
    table, grads, scalars, chunk_tensor, chunk_tiles, found_inf_at,
    HAS_FOUND_INF: tl.constexpr, P: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr, AMSGRAD: tl.constexpr,
    DECOUPLED: tl.constexpr, TINY_EPS: tl.constexpr, STOCHASTIC: tl.constexpr, FLAT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One program steps `chunk_tiles` tiles of a tensor whose states are fp32 (usually a small one)."""
    if HAS_FOUND_INF:  # noqa: SIM102 - a compile-time condition stands alone
        if tl.load(found_inf_at) != 0.0:
            return
    pid = tl.program_id(0)
    tensor = tl.load(chunk_tensor + pid)
    row = table + tensor.to(tl.int64) * COLUMNS
    hyper = load_hyper(scalars + tensor * SCALARS)
    begin = (pid - tl.load(row + FIRST_CHUNK)) * chunk_tiles * TILE
    end = tl.minimum(begin + chunk_tiles * TILE, tl.load(row + NUMEL))
    grad_at = _address(grads + tensor, 0, G, 0)
    param_at = _address(row, PARAM, P, 0)
    m_at = _address(row, EXP_AVG, tl.float32, 0)
    v_at = _address(row, EXP_AVG_SQ, tl.float32, 0)
    d_at = v_at
    if AMSGRAD:
        d_at = _address(row, MAX_EXP_AVG_SQ, tl.float32, 0)
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
        param, m, v, d = adam(param, grad, m, v, d, hyper, AMSGRAD, DECOUPLED, TINY_EPS, FAST)
        tl.store(param_at + at, round_to(param, at, row, hyper, P, STOCHASTIC, FLAT, FAST), mask=mask)
        tl.store(m_at + at, m, mask=mask)
        tl.store(v_at + at, v, mask=mask)
        if AMSGRAD:
            tl.store(d_at + at, d, mask=mask)
