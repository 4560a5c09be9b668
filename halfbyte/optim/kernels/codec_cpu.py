"""Codes computed from values, and back: the numba form of `state_ops.quantize` and `dequantize`.

fp8 is the cast of codec_cpu_cast. The 8-bit and 4-bit maps have two forms with the same results: groups of 64 values in
AVX-512 VBMI (codec_cpu_vector), where the CPU has it, and plain loops (codec_cpu_portable). With VBMI fp8 is decoded by
a table, too, in half the time of the cast.

Every function takes a tile, a few blocks with their scales, and loops over blocks within. Arrays named x, codes and
scales are [n] fp32, [n] uint8 (one code a byte) and [ceil(n / block_size)] fp32.
"""

import numpy as np

from halfbyte.optim.formats import SCALE_MIN
from halfbyte.optim.kernels import codec_cpu_portable, codec_cpu_vector
from halfbyte.optim.kernels.codec_cpu_cast import (
    ABS_MASK,
    F32,
    U32,
    bits_of,
    e4m3_to_float,
    float_of,
    float_to_e4m3,
    helper,
)

EIGHT, FOUR, FP8 = 0, 1, 2  # StateFormat.name, as the kernels take it
FORMAT_CODE = {"8bit": EIGHT, "4bit": FOUR, "fp8": FP8}

_form = codec_cpu_vector if codec_cpu_vector.has_permutes() else codec_cpu_portable
encode_8bit_signed, encode_8bit_unsigned = _form.encoder("8bit", True), _form.encoder("8bit", False)
encode_4bit_signed, encode_4bit_unsigned = _form.encoder("4bit", True), _form.encoder("4bit", False)
decode_8bit_signed, decode_8bit_unsigned = _form.decoder("8bit", True), _form.decoder("8bit", False)
decode_4bit_signed, decode_4bit_unsigned = _form.decoder("4bit", True), _form.decoder("4bit", False)


@helper
def _encode_fp8(x, scales, block_size, signed, codes):
    for block in range(scales.size):
        scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
        values, out = x[lo:hi], codes[lo:hi]
        for i in range(values.size):
            code = float_to_e4m3(values[i] / scale)
            least = U32(0) if signed else U32(values[i] > F32(0))
            out[i] = np.uint8(code if code > least else least)


@helper
def _decode_fp8(codes, scales, block_size, x):
    for block in range(scales.size):
        scale, lo, hi = scales[block], block * block_size, min(x.size, (block + 1) * block_size)
        source, values = codes[lo:hi], x[lo:hi]
        for i in range(values.size):
            values[i] = e4m3_to_float(source[i]) * scale


decode_fp8 = _form.decoder("fp8", True) if _form is codec_cpu_vector else _decode_fp8


@helper
def encode(x, scales, block_size, fmt, signed, codes):
    """Write the codes of finite values under the scales that `scale_of` gives their blocks."""
    if fmt == FP8:
        _encode_fp8(x, scales, block_size, signed, codes)
    elif fmt == FOUR:
        if signed:
            encode_4bit_signed(x, scales, block_size, codes)
        else:
            encode_4bit_unsigned(x, scales, block_size, codes)
    elif signed:
        encode_8bit_signed(x, scales, block_size, codes)
    else:
        encode_8bit_unsigned(x, scales, block_size, codes)


@helper
def decode(codes, scales, block_size, fmt, signed, x):
    """Write the values of codes."""
    if fmt == FP8:
        decode_fp8(codes, scales, block_size, x)
    elif fmt == FOUR:
        if signed:
            decode_4bit_signed(codes, scales, block_size, x)
        else:
            decode_4bit_unsigned(codes, scales, block_size, x)
    elif signed:
        decode_8bit_signed(codes, scales, block_size, x)
    else:
        decode_8bit_unsigned(codes, scales, block_size, x)


@helper
def larger(largest, x):
    """The larger of a magnitude's fp32 pattern and |x|'s; patterns order like values, Inf and NaN above all."""
    magnitude = U32(bits_of(x) & ABS_MASK)
    return magnitude if magnitude > largest else largest


@helper
def scale_of(largest, fmt):
    """A block's scale from the pattern of its largest magnitude."""
    amax = float_of(largest)
    amax = amax if amax > F32(SCALE_MIN) else F32(SCALE_MIN)
    return amax / F32(448) if fmt == FP8 else amax


@helper
def unpack(packed, codes):
    """[ceil(n/2)] bytes -> codes [n], one a byte; the even element comes from the high nibble."""
    for i in range(codes.size // 2):
        codes[2 * i] = packed[i] >> 4
        codes[2 * i + 1] = packed[i] & 15
    if codes.size % 2:
        codes[codes.size - 1] = packed[codes.size // 2] >> 4


@helper
def pack(codes, packed):
    """codes [n] -> [ceil(n/2)] bytes; an unused low nibble is 0."""
    for i in range(codes.size // 2):
        packed[i] = (codes[2 * i] << 4) | codes[2 * i + 1]
    if codes.size % 2:
        packed[codes.size // 2] = codes[codes.size - 1] << 4
