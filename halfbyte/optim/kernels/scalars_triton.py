"""The kernel that opens a step: it advances the step counts and works out every tensor's scalars.

It has a launch of its own (microseconds) because all programs of the step read a tensor's count; and it does in fp64,
once a tensor, what needs it: 1 - beta2^step in fp32 would be off by 6e-5 in the first step. The scalars lie in fp32
[tensors, SCALARS], so that no learning rate, beta or weight decay is a compile-time constant or crosses to the host.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(16)  # of the pointer table, which table_triton.py builds: int64 [tensors, COLUMNS]
PARAM = tl.constexpr(0)
EXP_AVG = tl.constexpr(1)  # a moment's codes (or fp32 values); its scales in the next column
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


@triton.jit
def fmix32(x):
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
    """Steps and scalars of TENSORS tensors; betas come as the sum of two fp32 numbers."""
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
    key = fmix32(seed ^ fmix32(step.to(tl.uint32)))
    multiply = fmix32(key + 0x9E3779B9) | 1

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
def load_hyper(s):
    """A tensor's scalars, loaded once by a program: a tuple in the order above."""
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
