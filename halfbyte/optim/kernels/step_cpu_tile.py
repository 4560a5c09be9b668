"""The numba form of `step_ref`: a list of chunks, each worked through in tiles that stay in the first-level cache.

A tile is a few blocks (about 1,000 values): parameters and gradients are widened to fp32, moments decoded, Adam's
formula applied, the parameter stored, and the new moments encoded, block by block, before the next tile is touched. So
memory is read and written once. Nothing is fetched ahead: the CPU does that by itself, and to ask for the next tile's
lines made a step 15 to 20% longer (Sapphire Rapids). `run` takes addresses rather than tensors, because one call serves
hundreds of tensors; it holds no lock of Python's, and step_cpu.py calls it from several threads on disjoint chunks.

A row of `table` describes a tensor (table_cpu.py). A row of `items` is (tensor, start, end),
whole tiles but for the tensor's end.
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
    adam_cpu,
    codec_cpu,
    codec_cpu_avx512,
    codec_cpu_cast,
    codec_cpu_guess,
    codec_cpu_lookup,
    codec_cpu_portable,
    codec_cpu_vector,
    memory_cpu,
    moments_cpu,
    table_cpu,
    values_cpu,
)
from halfbyte.optim.kernels.adam_cpu import prepare_gradient, update
from halfbyte.optim.kernels.codec_cpu_cast import F32, KERNEL, U32
from halfbyte.optim.kernels.memory_cpu import LINE, floats, halves
from halfbyte.optim.kernels.moments_cpu import read_moments, write_moments
from halfbyte.optim.kernels.table_cpu import FLOAT32, GRAD, PARAM, SEED, STEP
from halfbyte.optim.kernels.values_cpu import fmix32, store_nearest, store_stochastic, widened

GOLDEN = U32(0x9E3779B9)


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
        keys[t, 0] = fmix32(U32(U32(table[t, SEED]) ^ fmix32(U32(num_steps))))
        keys[t, 1] = U32(fmix32(U32(keys[t, 0] + GOLDEN)) | U32(1))


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
        moments, tile = room.moments, room.moments.shape[1]
        for item in range(items.shape[0]):
            t, end = items[item, 0], items[item, 2]
            row = table[t]
            factor, root = factors[t, 0], factors[t, 1]
            for start in range(items[item, 1], end, tile):
                n = min(tile, end - start)
                p = floats(widened(row[PARAM], start, kinds[0], room.params[:n]), n)
                g = floats(widened(row[GRAD], start, kinds[1], room.grads[:n]), n)
                if grad_scale != F32(1) or maximize or l2 != F32(0):
                    prepare_gradient(g, p, room.grads[:n], grad_scale, maximize, l2)
                    g = room.grads[:n]
                read_moments(row, start, n, fmt, block_size, moments, room.codes)
                largest = room.largest[:, : (n + block_size - 1) // block_size]
                update(p, g, moments, block_size, largest, keep, weight1, beta2, weight2, factor, root, eps)
                if stochastic:
                    narrow = halves(row[PARAM] + 2 * start, n)
                    store_stochastic(p, narrow, row, start, keys[t, 0], keys[t, 1])
                elif kinds[0] != FLOAT32:
                    store_nearest(p, halves(row[PARAM] + 2 * start, n), kinds[0])
                write_moments(row, start, n, fmt, block_size, moments, room.codes, largest, room.bad)

    return run


CODECS = (codec_cpu, codec_cpu_avx512, codec_cpu_cast, codec_cpu_guess, codec_cpu_lookup, codec_cpu_portable)
PARTS = (adam_cpu, codec_cpu_vector, memory_cpu, moments_cpu, table_cpu, values_cpu)
run = _compiled(_checksum(formats, *CODECS, *PARTS))
