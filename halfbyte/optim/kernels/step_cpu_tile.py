"""The numba form of `step_ref`: a list of chunks, each worked through in tiles that stay in the first-level cache.

A tile is a few blocks (about 1,000 values): parameters and gradients are widened to fp32, moments decoded, Adam's
formula applied, the parameter stored, and the new moments encoded, block by block, before the next tile is touched. So
memory is read and written once. `run` takes addresses rather than tensors, because one call serves hundreds of tensors;
it holds no lock of Python's, and step_cpu.py calls it from several threads on disjoint chunks.

A row of `table` describes a tensor; its columns are the names in `COLUMNS`. A row of `items` is (tensor, start, end),
whole tiles but for the tensor's end. Formula and rounding follow torch's CPU kernels (lerp and addcmul are fused
multiply-adds), so that results equal step_ref's bit for bit wherever its torch uses the same instructions.
"""

import math
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from halfbyte.optim import formats
from halfbyte.optim.kernels import (
    codec_cpu,
    codec_cpu_avx512,
    codec_cpu_cast,
    codec_cpu_guess,
    codec_cpu_lookup,
    codec_cpu_portable,
    codec_cpu_vector,
    memory_cpu,
)
from halfbyte.optim.kernels.codec_cpu import (
    EIGHT,
    FOUR,
    decode,
    encode,
    larger,
    pack,
    scale_of,
    unpack,
)
from halfbyte.optim.kernels.codec_cpu_cast import (
    F32,
    INF_BITS,
    KERNEL,
    U32,
    bf16_to_float,
    bits_of,
    float_to_bf16,
    float_to_half,
    fma,
    half_to_float,
    helper,
)
from halfbyte.optim.kernels.memory_cpu import LINE, floats, halves, octets, prefetch

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


@njit(**KERNEL)
def advance(table, lr, beta1, beta2, factors, keys):
    """Count the step of every tensor and derive what depends on it.

    factors  [T, 2] fp32: -lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step); keys [T, 2] uint32: rounding.step_key.
    """
    for t in range(table.shape[0]):
        counter = floats(table[t, STEP], 1)
        counter[0] += F32(1)
        num_steps = np.int64(counter[0])
        factors[t, 0] = F32(-lr / (1 - math.pow(beta1, float(num_steps))))
        factors[t, 1] = F32(1 / math.sqrt(1 - math.pow(beta2, float(num_steps))))
        keys[t, 0] = _fmix32(U32(U32(table[t, SEED]) ^ _fmix32(U32(num_steps))))
        keys[t, 1] = U32(_fmix32(U32(keys[t, 0] + GOLDEN)) | U32(1))


@helper
def _widened(address, start, kind, scratch):
    """The address of `scratch.size` values as fp32: where they are, or that of a widened copy in scratch."""
    if kind == FLOAT32:
        return address + 4 * start
    narrow = halves(address + 2 * start, scratch.size)
    if kind == BFLOAT16:
        for i in range(scratch.size):
            scratch[i] = bf16_to_float(narrow[i])
    else:
        for i in range(scratch.size):
            scratch[i] = half_to_float(narrow[i])
    return np.int64(scratch.ctypes.data)


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
def _prepare_gradient(g, p, out, grad_scale, maximize, l2):
    """A copy of g that is unscaled, flipped, and given an L2 penalty; `out` may be g itself."""
    sign = F32(-1) if maximize else F32(1)
    for i in range(g.size):
        out[i] = sign * (g[i] / grad_scale)
    if l2 != F32(0):
        for i in range(g.size):
            out[i] = out[i] + l2 * p[i]


@helper
def _adam(p, g, m, v, keep, weight1, beta2, weight2, factor, root, eps):
    """AdamW of a block, in place; the patterns of the largest magnitudes of its new moments are returned.

    keep = 1 - lr * decay; factor and root are `advance`'s; weights are 1 - beta.
    """
    largest_m, largest_v = U32(0), U32(0)
    for i in range(p.size):
        m[i] = fma(weight1, g[i] - m[i], m[i])
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(v[i]) * root + eps)
        largest_m, largest_v = larger(largest_m, m[i]), larger(largest_v, v[i])
    return largest_m, largest_v


@helper
def _amsgrad(p, g, m, v, d, keep, weight1, beta2, weight2, factor, root, eps):
    """The same with d, the largest v so far, in the denominator."""
    largest_m, largest_v, largest_d = U32(0), U32(0), U32(0)
    for i in range(p.size):
        m[i] = fma(weight1, g[i] - m[i], m[i])
        v[i] = fma(weight2 * g[i], g[i], v[i] * beta2)
        # torch.maximum: a NaN on either side wins
        d[i] = v[i] if (v[i] > d[i]) | (v[i] != v[i]) else d[i]
        p[i] = p[i] * keep + factor * m[i] / (math.sqrt(d[i]) * root + eps)
        largest_m, largest_v = larger(largest_m, m[i]), larger(largest_v, v[i])
        largest_d = larger(largest_d, d[i])
    return largest_m, largest_v, largest_d


@helper
def _update(p, g, moments, block_size, largest, *scalars):
    """The formula, block by block; largest [K, blocks] is written."""
    for block in range(largest.shape[1]):
        lo, hi = block * block_size, min(p.size, (block + 1) * block_size)
        m, v, d = moments[0][lo:hi], moments[1][lo:hi], moments[moments.shape[0] - 1][lo:hi]
        if moments.shape[0] == 2:
            largest[0, block], largest[1, block] = _adam(p[lo:hi], g[lo:hi], m, v, *scalars)
        else:
            largest[0, block], largest[1, block], largest[2, block] = _amsgrad(p[lo:hi], g[lo:hi], m, v, d, *scalars)


@helper
def _code_of_bad(fmt, signed):
    """state_ops: the zero code of a first moment, the largest code of a second."""
    if signed:
        return 127 if fmt == EIGHT else (7 if fmt == FOUR else 0)
    return 255 if fmt == EIGHT else (15 if fmt == FOUR else 126)


@helper
def _all_finite(largest):
    for k in range(largest.shape[0]):
        for block in range(largest.shape[1]):
            if largest[k, block] >= INF_BITS:
                return False
    return True


@helper
def _set_aside(moments, n, block_size, largest, bad):
    """Mark the elements of which a moment is not finite in `bad` [tile] uint8, and set all their moments to 0, so that
    they have no share in any scale; `largest` is found anew."""
    for i in range(n):
        for k in range(moments.shape[0]):
            if U32(bits_of(moments[k, i]) & INF_BITS) == INF_BITS:
                bad[i] = 1
    for k in range(moments.shape[0]):
        largest[k, :] = U32(0)
        for i in range(n):
            moments[k, i] = F32(0) if bad[i] else moments[k, i]
            largest[k, i // block_size] = larger(largest[k, i // block_size], moments[k, i])


@helper
def _read_moments(row, start, n, fmt, block_size, moments, codes):
    """Decode n values of a tile, or copy them where the states are fp32."""
    for k in range(moments.shape[0]):
        address = row[MOMENTS + 2 * k]
        if row[QUANTIZED] == 0:
            _copy(floats(address + 4 * start, n), moments[k][:n])
            continue
        first, num_blocks = start // block_size, (n + block_size - 1) // block_size
        scales = floats(row[MOMENTS + 2 * k + 1] + 4 * first, num_blocks)
        if fmt == FOUR:
            unpack(octets(address + start // 2, (n + 1) // 2), codes[k][:n])
            decode(codes[k][:n], scales, block_size, fmt, k == 0, moments[k][:n])
        else:
            decode(octets(address + start, n), scales, block_size, fmt, k == 0, moments[k][:n])


@helper
def _write_moments(row, start, n, fmt, block_size, moments, codes, largest, bad):
    """Encode n values of a tile into memory: moments [K, tile] fp32, exp_avg first, which is the only signed one."""
    if row[QUANTIZED] == 0:
        for k in range(moments.shape[0]):
            _copy(moments[k], floats(row[MOMENTS + 2 * k] + 4 * start, n))
        return
    finite = _all_finite(largest)
    if not finite:
        _set_aside(moments, n, block_size, largest, bad)
    for k in range(moments.shape[0]):
        scales = floats(row[MOMENTS + 2 * k + 1] + 4 * (start // block_size), largest.shape[1])
        for block in range(largest.shape[1]):
            scales[block] = scale_of(largest[k, block], fmt)
        out = codes[k][:n] if fmt == FOUR else octets(row[MOMENTS + 2 * k] + start, n)
        encode(moments[k][:n], scales, block_size, fmt, k == 0, out)
        if not finite:
            for i in range(n):
                out[i] = _code_of_bad(fmt, k == 0) if bad[i] else out[i]
        if fmt == FOUR:
            pack(out, octets(row[MOMENTS + 2 * k] + start // 2, (n + 1) // 2))
    if not finite:
        bad[:] = 0


@helper
def _prefetch_lines(address, num_bytes):
    for offset in range(0, num_bytes, LINE):
        prefetch(address + offset)


@helper
def _prefetch(row, start, n, kinds, fmt, num_moments):
    """Ask for n values of the tile after this one."""
    for k in range(2):
        size = 4 if kinds[k] == FLOAT32 else 2
        _prefetch_lines(row[PARAM if k == 0 else GRAD] + size * start, size * n)
    half_bytes = 8 if row[QUANTIZED] == 0 else (1 if fmt == FOUR else 2)
    for k in range(num_moments):
        _prefetch_lines(row[MOMENTS + 2 * k] + half_bytes * start // 2, half_bytes * n // 2)


class Room(NamedTuple):
    """What a thread works in; the contents of `bad` must be 0."""

    params: np.ndarray  # [tile] fp32
    grads: np.ndarray  # [tile] fp32
    moments: np.ndarray  # [K, tile] fp32
    codes: np.ndarray  # [K, tile] uint8
    largest: np.ndarray  # [K, blocks of a tile] uint32
    bad: np.ndarray  # [tile] uint8


def new_room(num_moments: int, tile: int, block_size: int) -> Room:
    def zeros(dtype: type, *shape: int) -> np.ndarray:
        """At the start of a cache line: a load across two lines takes twice as long."""
        buffer: np.ndarray = np.zeros(math.prod(shape) + LINE, dtype)
        skipped = -buffer.ctypes.data % LINE // buffer.itemsize
        return buffer[skipped : skipped + math.prod(shape)].reshape(shape)

    return Room(
        zeros(np.float32, tile),
        zeros(np.float32, tile),
        zeros(np.float32, num_moments, tile),
        zeros(np.uint8, num_moments, tile),
        zeros(np.uint32, num_moments, -(-tile // block_size)),
        zeros(np.uint8, tile),
    )


def _checksum(*modules: ModuleType) -> int:
    """Of the modules' source files."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules))


def _compiled(sources: int) -> Any:
    """`run`, whose cached form belongs to these sources.

    numba looks at this file's time stamp and at closed-over values only, and would go on with old codecs and tables
    after an edit elsewhere.
    """

    @njit(**KERNEL)
    def run(table, items, room, factors, keys, kinds, fmt, block_size, weights, grad_scale, flags):
        """Step the chunks in `items` [I, 3].

        room     this thread's own; its sizes say how many moments there are, and how many values to work on at a time:
                 whole blocks, an even number.
        kinds    (parameter, gradient): FLOAT32, BFLOAT16 or FLOAT16.
        weights  (1 - lr * decay, 1 - beta1, beta2, 1 - beta2, eps, L2 penalty), fp32.
        flags    (maximize, stochastic).
        """
        if sources < 0:
            return
        keep, weight1, beta2, weight2, eps, l2 = weights
        maximize, stochastic = flags
        moments, num_moments, tile = room.moments, room.moments.shape[0], room.moments.shape[1]
        for item in range(items.shape[0]):
            t, end = items[item, 0], items[item, 2]
            row = table[t]
            factor, root = factors[t, 0], factors[t, 1]
            for start in range(items[item, 1], end, tile):
                n = min(tile, end - start)
                _prefetch(row, start + n, min(tile, end - start - n), kinds, fmt, num_moments)
                p = floats(_widened(row[PARAM], start, kinds[0], room.params[:n]), n)
                g = floats(_widened(row[GRAD], start, kinds[1], room.grads[:n]), n)
                if grad_scale != F32(1) or maximize or l2 != F32(0):
                    _prepare_gradient(g, p, room.grads[:n], grad_scale, maximize, l2)
                    g = room.grads[:n]
                _read_moments(row, start, n, fmt, block_size, moments, room.codes)
                largest = room.largest[:, : (n + block_size - 1) // block_size]
                _update(p, g, moments, block_size, largest, keep, weight1, beta2, weight2, factor, root, eps)
                if stochastic:
                    narrow = halves(row[PARAM] + 2 * start, n)
                    _store_stochastic(p, narrow, row, start, keys[t, 0], keys[t, 1])
                elif kinds[0] != FLOAT32:
                    _store_nearest(p, halves(row[PARAM] + 2 * start, n), kinds[0])
                _write_moments(row, start, n, fmt, block_size, moments, room.codes, largest, room.bad)

    return run


CODECS = (codec_cpu, codec_cpu_avx512, codec_cpu_cast, codec_cpu_guess, codec_cpu_lookup, codec_cpu_portable)
run = _compiled(_checksum(formats, *CODECS, codec_cpu_vector, memory_cpu))
