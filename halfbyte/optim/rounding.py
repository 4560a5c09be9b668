"""Stochastic rounding of fp32 weights to bf16, from a counter-based generator.

A weight is rounded up with the probability that makes the mean exact, so that updates smaller than half a bf16 step
are not lost. The 16 random bits are a hash of (parameter's seed, step, global element index): no generator state to
save, torch's own RNG is left alone, and a shard draws what the whole tensor would have drawn. All arithmetic is
unsigned 32 bits, and every path (plain torch, numba, Triton) must give the same bits:

    step      the step count after its increment, as uint32
    key       = fmix32(seed ^ fmix32(step))
    multiply  = fmix32(key + 0x9E3779B9) | 1
    random    = fmix32(lo * multiply + key + hi * 0x85EBCA6B) & 0xFFFF      lo, hi: halves of the 64-bit global index
    bf16      = upper half of (bits of the fp32 value + random); NaN and Inf are cast plainly

`fmix32` is MurmurHash3's finalizer (Appleby, public domain). Rejected: Philox, whose ten rounds cost more than the
rest of the step; 16 bits of a bijective mix are unbiased to 1e-5 of a bf16 step, which the tests check.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


class Counter(NamedTuple):
    """Names the random numbers of one parameter (or of its local shard).

    seed    32 bits, from the optimizer's seed and the parameter's place in it (`param_seed`).
    offset  global row-major index of local element 0.
    inner   run length: local element i has the global index offset + (i // inner) * outer + i % inner.
    outer   distance of two runs in the whole tensor. For a whole tensor or rows of it: inner = outer = local numel.
    """

    seed: int
    offset: int
    inner: int
    outer: int


def fmix32(x: int) -> int:
    """MurmurHash3's 32-bit finalizer."""
    x ^= x >> 16
    x = (x * 0x85EBCA6B) & MASK
    x ^= x >> 13
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def param_seed(seed: int, index: int) -> int:
    """The seed of the optimizer's `index`-th parameter, counted over its groups."""
    return fmix32((seed & MASK) ^ fmix32((index + 1) * 0x9E3779B9 & MASK))


def step_key(seed: int, step: int) -> tuple[int, int]:
    """(key, multiply) of the docstring above, for one parameter and step."""
    key = fmix32(seed ^ fmix32(step & MASK))
    return key, fmix32((key + 0x9E3779B9) & MASK) | 1


def _multiply(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32, for int64 x in [0, 2^32): in 16-bit halves, since int64 products would overflow."""
    return ((x & 0xFFFF) * factor + (((x >> 16) * factor & 0xFFFF) << 16)) & MASK


def random_bits(counter: Counter, step: int, start: int, end: int, device: torch.device) -> Tensor:
    """16 random bits for local elements start..end: int32 [end - start] in [0, 65536)."""
    key, multiply = step_key(counter.seed, step)
    i = torch.arange(start, end, dtype=torch.int64, device=device)
    index = counter.offset + i // counter.inner * counter.outer + i % counter.inner
    x = (_multiply(index & MASK, multiply) + key + _multiply(index >> 32, 0x85EBCA6B)) & MASK
    x ^= x >> 16
    x = _multiply(x, 0x85EBCA6B)
    x ^= x >> 13
    x = _multiply(x, 0xC2B2AE35)
    x ^= x >> 16
    return (x & 0xFFFF).to(torch.int32)


def round_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """fp32 [n] -> bf16 [n], up with probability (distance to the lower neighbour) / (bf16 step)."""
    bits = (x.view(torch.int32) + random) & -65536
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)
