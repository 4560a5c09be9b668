"""The numba form of `step_ref`: a list of chunks, each worked through in tiles that stay in the first-level cache.

A tile is a few blocks (about 512 values): parameters and gradients are widened to fp32, moments decoded, Adam's formula
applied, the parameter stored, and the new moments encoded, block by block, before the next tile is touched. So memory
is read and written once. `run` takes addresses rather than tensors, because one call serves hundreds of tensors; it
holds no lock of Python's, and step_cpu.py calls it from several threads on disjoint chunks.

A row of `table` describes a tensor; its columns are the names in `COLUMNS`. A row of `items` is (tensor, start, end),
whole tiles but for the tensor's end. Formula and rounding follow torch's CPU kernels (lerp and addcmul are fused
multiply-adds), so that results equal step_ref's bit for bit wherever its torch uses the same instructions.
"""

import math
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
from numba import njit

from halfbyte.optim import formats
from halfbyte.optim.kernels import codec_cpu, codec_cpu_cast, codec_cpu_lookup
from halfbyte.optim.kernels.codec_cpu import (
    EIGHT,
    FOUR,
    amax_bits,
    decode,
    encode,
    pack,
    scale_of,
    unpack,
)
from halfbyte.optim.kernels.codec_cpu_cast import (
    F32,
    INF_BITS,
    U32,
    bf16_to_float,
    bits_of,
    float_to_bf16,
    float_to_half,
    fma,
    half_to_float,
    helper,
    pointer,
)

COLUMNS = (
    "param", "grad", "numel", "step", "quantized",
    "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "max_exp_avg_sq", "max_exp_avg_sq_scale",
    "seed", "offset", "inner", "outer",
)  # fmt: skip
PARAM, GRAD, NUMEL, STEP, QUANTIZED, MOMENTS, SEED, OFFSET, INNER, OUTER = 0, 1, 2, 3, 4, 5, 11, 12, 13, 14
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
GOLDEN, MIX1, MIX2 = U32(0x9E3779B9), U32(0x85EBCA6B), U32(0xC2B2AE35)


@helper
def _fmix32(x):
    x = U32(x ^ U32(x >> U32(16)))
    x = U32(x * MIX1)
    x = U32(x ^ U32(x >> U32(13)))
    x = U32(x * MIX2)
    return U32(x ^ U32(x >> U32(16)))


@njit(cache=True, nogil=True, error_model="numpy")
def advance(table, lr, beta1, beta2, factors, keys):
    """Count the step of every tensor and derive what depends on it.

    factors  [T, 2] fp32: -lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step); keys [T, 2] uint32: rounding.step_key.
    """
    for t in range(table.shape[0]):
        counter = numba.carray(pointer(table[t, STEP]), (1,), np.float32)
        counter[0] += F32(1)
        num_steps = np.int64(counter[0])
        factors[t, 0] = F32(-lr / (1 - math.pow(beta1, float(num_steps))))
        factors[t, 1] = F32(1 / math.sqrt(1 - math.pow(beta2, float(num_steps))))
        keys[t, 0] = _fmix32(U32(U32(table[t, SEED]) ^ _fmix32(U32(num_steps))))
        keys[t, 1] = U32(_fmix32(U32(keys[t, 0] + GOLDEN)) | U32(1))


@helper
def _floats(address, start, n):
    """`n` fp32 values in memory."""
    return numba.carray(pointer(address + 4 * start), (n,), np.float32)


@helper
def _halves(address, start, n):
    """`n` bf16 or fp16 patterns in memory."""
    return numba.carray(pointer(address + 2 * start), (n,), np.uint16)


@helper
def _bytes(address, start, n):
    return numba.carray(pointer(address + start), (n,), np.uint8)


@helper
def _widened(address, start, kind, scratch):
    """`scratch.size` values as fp32: the memory itself, or a widened copy in scratch."""
    if kind == FLOAT32:
        return _floats(address, start, scratch.size)
    narrow = _halves(address, start, scratch.size)
    if kind == BFLOAT16:
        for i in range(scratch.size):
            scratch[i] = bf16_to_float(narrow[i])
    else:
        for i in range(scratch.size):
            scratch[i] = half_to_float(narrow[i])
    return scratch


@helper
def _copy(source, target):
    for i in range(target.size):
        target[i] = source[i]


@helper
def _store_nearest(x, narrow, kind):
    if kind == BFLOAT16:
        for i in range(x.size):
            narrow[i] = float_to_bf16(x[i])
    else:
        for i in range(x.size):
            narrow[i] = float_to_half(x[i])


@helper
def _rounded_up_or_down(x, index, key, multiply):
    """bf16 pattern of x, rounded by the random bits of a global index; see halfbyte.optim.rounding."""
    low = U32(U32(index) * multiply)
    high = U32(U32(index >> 32) * MIX1)
    random = U32(_fmix32(U32(U32(low + key) + high)) & U32(0xFFFF))
    bits = bits_of(x)
    finite = U32(bits & U32(0x7F800000)) != INF_BITS
    return np.uint16(U32(bits + random) >> U32(16)) if finite else float_to_bf16(x)


@helper
def _store_stochastic(x, narrow, row, start, key, multiply):
    """Into bf16; row gives the global index of local element `start`."""
    n = x.size
    if row[INNER] >= row[NUMEL]:
        for i in range(n):
            narrow[i] = _rounded_up_or_down(x[i], row[OFFSET] + start + i, key, multiply)
        return
    run, place = start // row[INNER], start % row[INNER]
    for i in range(n):
        index = row[OFFSET] + run * row[OUTER] + place
        narrow[i] = _rounded_up_or_down(x[i], index, key, multiply)
        place += 1
        if place == row[INNER]:
            run, place = run + 1, 0


@helper
def _prepared_gradient(g, p, scratch, grad_scale, maximize, l2):
    """g itself, or a copy that is unscaled, flipped, and given an L2 penalty."""
    if grad_scale == F32(1) and not maximize and l2 == F32(0):
        return g
    sign = F32(-1) if maximize else F32(1)
    for i in range(g.size):
        scratch[i] = sign * (g[i] / grad_scale)
    if l2 != F32(0):
        for i in range(g.size):
            scratch[i] = scratch[i] + l2 * p[i]
    return scratch


@helper
def _adam(p, g, m, v, keep, weight1, beta2, weight2, factor, root, eps):
    """AdamW in place. keep = 1 - lr * decay; factor and root are `advance`'s; weights are 1 - beta."""
    for i in range(p.size):
        m[i] = fma(weight1, g[i] - m[i], m[i])
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(v[i]) * root + eps)


@helper
def _amsgrad(p, g, m, v, d, keep, weight1, beta2, weight2, factor, root, eps):
    """The same with d, the largest v so far, in the denominator."""
    for i in range(p.size):
        m[i] = fma(weight1, g[i] - m[i], m[i])
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        # torch.maximum: a NaN on either side wins
        d[i] = v[i] if (v[i] > d[i]) | (v[i] != v[i]) else d[i]
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(d[i]) * root + eps)


@helper
def _code_of_bad(fmt, signed):
    """state_ops: the zero code of a first moment, the largest code of a second."""
    if signed:
        return 127 if fmt == EIGHT else (7 if fmt == FOUR else 0)
    return 255 if fmt == EIGHT else (15 if fmt == FOUR else 126)


@helper
def _scale_block(moments, lo, hi, fmt, block, scales, bad):
    """Scales of one block, values lo..hi of a tile: moments [K, tile] fp32 -> scales[:, block]; bad [tile] uint8.

    Where a moment is not finite, its element is marked in `bad` and all its moments are set to 0, so that it has no
    share in any scale; then returns False.
    """
    worst = U32(0)
    for k in range(moments.shape[0]):
        largest = amax_bits(moments[k][lo:hi])
        scales[k, block] = scale_of(largest, fmt)
        worst = largest if largest > worst else worst
    if worst < INF_BITS:
        return True
    for i in range(lo, hi):
        for k in range(moments.shape[0]):
            if U32(bits_of(moments[k, i]) & INF_BITS) == INF_BITS:
                bad[i] = 1
        if bad[i]:
            for k in range(moments.shape[0]):
                moments[k, i] = F32(0)
    for k in range(moments.shape[0]):
        scales[k, block] = scale_of(amax_bits(moments[k][lo:hi]), fmt)
    return False


@helper
def _read_moments(row, start, n, fmt, block_size, moments, codes):
    """Decode n values of a tile, or copy them where the states are fp32."""
    for k in range(moments.shape[0]):
        address = row[MOMENTS + 2 * k]
        if row[QUANTIZED] == 0:
            _copy(_floats(address, start, n), moments[k][:n])
            continue
        scales = _floats(row[MOMENTS + 2 * k + 1], start // block_size, (n + block_size - 1) // block_size)
        if fmt == FOUR:
            unpack(_bytes(address, start // 2, (n + 1) // 2), codes[k][:n])
            decode(codes[k][:n], scales, block_size, fmt, k == 0, moments[k][:n])
        else:
            decode(_bytes(address, start, n), scales, block_size, fmt, k == 0, moments[k][:n])


@helper
def _write_moments(row, start, n, fmt, block_size, moments, codes, scales, bad):
    """Encode n values of a tile into memory: moments [K, tile] fp32, exp_avg first, which is the only signed one."""
    num_moments, num_blocks = moments.shape[0], (n + block_size - 1) // block_size
    if row[QUANTIZED] == 0:
        for k in range(num_moments):
            _copy(moments[k], _floats(row[MOMENTS + 2 * k], start, n))
        return
    finite = True
    for block in range(num_blocks):
        finite &= _scale_block(moments, block * block_size, min(n, (block + 1) * block_size), fmt, block, scales, bad)
    for k in range(num_moments):
        _copy(scales[k], _floats(row[MOMENTS + 2 * k + 1], start // block_size, num_blocks))
        out = codes[k][:n] if fmt == FOUR else _bytes(row[MOMENTS + 2 * k], start, n)
        encode(moments[k][:n], scales[k][:num_blocks], block_size, fmt, k == 0, out)
        if not finite:
            for i in range(n):
                out[i] = _code_of_bad(fmt, k == 0) if bad[i] else out[i]
        if fmt == FOUR:
            pack(out, _bytes(row[MOMENTS + 2 * k], start // 2, (n + 1) // 2))
    if not finite:
        bad[:] = 0


def _checksum(*modules: ModuleType) -> int:
    """Of the modules' source files."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))


def _compiled(sources: int) -> Any:
    """`run`, whose cached form belongs to these sources.

    numba looks at this file's time stamp and at closed-over values only, and would go on with old codecs and tables
    after an edit elsewhere.
    """

    @njit(cache=True, nogil=True, error_model="numpy")
    def run(table, items, factors, keys, kinds, fmt, block_size, tile, num_moments, weights, grad_scale, flags):
        """Step the chunks in `items` [I, 3].

        kinds    (parameter, gradient): FLOAT32, BFLOAT16 or FLOAT16.
        tile     values worked on at a time: whole blocks, an even number.
        weights  (1 - lr * decay, 1 - beta1, beta2, 1 - beta2, eps, L2 penalty), fp32.
        flags    (maximize, stochastic).
        """
        if sources < 0:
            return
        param_kind, grad_kind = kinds
        keep, weight1, beta2, weight2, eps, l2 = weights
        maximize, stochastic = flags
        p_scratch, g_scratch = np.empty(tile, np.float32), np.empty(tile, np.float32)
        moments, codes = np.empty((num_moments, tile), np.float32), np.empty((num_moments, tile), np.uint8)
        scales = np.empty((num_moments, (tile + block_size - 1) // block_size), np.float32)
        bad = np.zeros(tile, np.uint8)
        for item in range(items.shape[0]):
            t = items[item, 0]
            row = table[t]
            factor, root = factors[t, 0], factors[t, 1]
            for start in range(items[item, 1], items[item, 2], tile):
                n = min(tile, items[item, 2] - start)
                p = _widened(row[PARAM], start, param_kind, p_scratch[:n])
                g = _widened(row[GRAD], start, grad_kind, g_scratch[:n])
                g = _prepared_gradient(g, p, g_scratch[:n], grad_scale, maximize, l2)
                _read_moments(row, start, n, fmt, block_size, moments, codes)
                m, v, d = moments[0][:n], moments[1][:n], moments[num_moments - 1][:n]
                if num_moments == 2:
                    _adam(p, g, m, v, keep, weight1, beta2, weight2, factor, root, eps)
                else:
                    _amsgrad(p, g, m, v, d, keep, weight1, beta2, weight2, factor, root, eps)
                if stochastic:
                    narrow = _halves(row[PARAM], start, n)
                    _store_stochastic(p, narrow, row, start, keys[t, 0], keys[t, 1])
                elif param_kind != FLOAT32:
                    _store_nearest(p, _halves(row[PARAM], start, n), param_kind)
                _write_moments(row, start, n, fmt, block_size, moments, codes, scales, bad)

    return run


run = _compiled(_checksum(formats, codec_cpu, codec_cpu_cast, codec_cpu_lookup))
