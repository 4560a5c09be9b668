"""NVFP4 to dense in one pass: 0.5625 bytes read and 2 written (bf16) a value.

A thread takes a word of eight codes and writes eight neighbours: 16 bytes of bf16, so loads and stores coalesce without
an exchange between threads. Four words of a thread are loaded before the first is used. The order of the products is
the reference's (../dequantize.py), so the bits are equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.nvfp4.kernels.codec_triton import e2m1_to_float, e4m3_to_float
from halfbyte.nvfp4.kernels.words import as_words

CODES_PER_WORD = tl.constexpr(8)
NUM_WARPS = 4
BLOCK_WORDS = 32 * NUM_WARPS  # one word a thread, four times


@triton.jit
def load_word(words_ptr, scale_ptr, word, num_words):
    """(eight codes, their block scale's byte) of each word index."""
    inside = word < num_words
    return tl.load(words_ptr + word, mask=inside, other=0), tl.load(scale_ptr + word // 2, mask=inside, other=0)


@triton.jit
def store_values(out_ptr, word, num_words, codes, scale_byte, global_scale):
    """Write the eight values of each word."""
    block_scale = global_scale * e4m3_to_float(scale_byte.to(tl.int32))
    column = tl.arange(0, CODES_PER_WORD)
    values = e2m1_to_float(codes[:, None] << (28 - 4 * column)[None, :]) * block_scale[:, None]
    place = word[:, None] * CODES_PER_WORD + column[None, :]
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), mask=(word < num_words)[:, None])


@triton.jit
def dequantize_kernel(words_ptr, scale_ptr, global_scale_ptr, out_ptr, num_words, BLOCK: tl.constexpr):
    """One program: 4 * BLOCK words, of the flattened weight."""
    global_scale = tl.load(global_scale_ptr)
    start = tl.program_id(0).to(tl.int64) * (4 * BLOCK)
    words_ptr += start
    scale_ptr += start // 2
    out_ptr += start * CODES_PER_WORD
    left = tl.minimum(num_words - start, 4 * BLOCK).to(tl.int32)
    word = tl.arange(0, BLOCK)
    codes_0, scale_0 = load_word(words_ptr, scale_ptr, word, left)
    codes_1, scale_1 = load_word(words_ptr, scale_ptr, word + BLOCK, left)
    codes_2, scale_2 = load_word(words_ptr, scale_ptr, word + 2 * BLOCK, left)
    codes_3, scale_3 = load_word(words_ptr, scale_ptr, word + 3 * BLOCK, left)
    store_values(out_ptr, word, left, codes_0, scale_0, global_scale)
    store_values(out_ptr, word + BLOCK, left, codes_1, scale_1, global_scale)
    store_values(out_ptr, word + 2 * BLOCK, left, codes_2, scale_2, global_scale)
    store_values(out_ptr, word + 3 * BLOCK, left, codes_3, scale_3, global_scale)


def dequantize_into(out: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Fill out [N, K] (bf16, fp16 or fp32, contiguous) from qdata uint8 [N, K/2], scale uint8 [N, K/16], fp32 []."""
    words = as_words(qdata)
    num_words = words.numel()
    if num_words:
        grid = (triton.cdiv(num_words, 4 * BLOCK_WORDS),)
        dequantize_kernel[grid](
            words, scale.contiguous(), global_scale, out, num_words, BLOCK=BLOCK_WORDS, num_warps=NUM_WARPS
        )
    return out


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense weight [N, K] in dtype; arguments as `dequantize_into`'s."""
    out = torch.empty(qdata.shape[0], 2 * qdata.shape[1], dtype=dtype, device=qdata.device)
    return dequantize_into(out, qdata, scale, global_scale)
