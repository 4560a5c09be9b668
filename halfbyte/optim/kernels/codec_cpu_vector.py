"""The 8-bit and 4-bit maps in groups of 64 values, in AVX-512 VBMI: encode and decode a tile.

codec_cpu_guess and codec_cpu_lookup do a group; what is left of a block is done one by one.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import config

from halfbyte.optim.formats import codebook
from halfbyte.optim.kernels import codec_cpu_guess, codec_cpu_lookup
from halfbyte.optim.kernels.codec_cpu_cast import helper
from halfbyte.optim.kernels.codec_cpu_portable import exact
from halfbyte.optim.kernels.memory_cpu import pointer

GROUP = 64


def has_permutes() -> bool:
    """Whether the host has AVX-512 VBMI and numba compiles for the host."""
    if getattr(config, "CPU_NAME", None) or getattr(config, "CPU_FEATURES", None):  # numba was told another CPU
        return False
    try:
        return bool(llvm.get_host_cpu_features().get("avx512vbmi"))
    except RuntimeError:  # LLVM cannot tell on some platforms
        return False


def encoder(name: str, signed: bool) -> Any:
    """`encode(x, scales, block_size, codes)` of a map."""
    is_8bit, encode_64 = name == "8bit", codec_cpu_guess.encoder(name, signed)

    @helper
    def encode(x, scales, block_size, codes):
        for block in range(scales.size):
            scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
            values, out = x[lo:hi], codes[lo:hi]
            source, target, whole = np.int64(values.ctypes.data), np.int64(out.ctypes.data), values.size // GROUP
            for i in range(whole):
                encode_64(pointer(source + 4 * GROUP * i), scale, pointer(target + GROUP * i))
            if GROUP * whole < values.size:
                exact(values[GROUP * whole :], scale, is_8bit, signed, out[GROUP * whole :])

    return encode


def decoder(name: str, signed: bool) -> Any:
    """`decode(codes, scales, block_size, x)` of a map."""
    table, decode_64 = codebook(name, signed).numpy(), codec_cpu_lookup.decoder(name, signed)

    @helper
    def decode(codes, scales, block_size, x):
        for block in range(scales.size):
            scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
            source, out = codes[lo:hi], x[lo:hi]
            start, target, whole = np.int64(source.ctypes.data), np.int64(out.ctypes.data), out.size // GROUP
            for i in range(whole):
                decode_64(pointer(start + GROUP * i), scale, pointer(target + 4 * GROUP * i))
            for i in range(GROUP * whole, out.size):
                out[i] = table[source[i]] * scale

    return decode
