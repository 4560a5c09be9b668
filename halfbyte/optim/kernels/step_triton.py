"""The fused step on a CUDA device: the host's part. Contract: `halfbyte.optim.kernels.step`.

A step is a launch of `prepare` (one program for 128 tensors: step counts and bias corrections) and one of
`step_blocks` over all quantized tensors; where there are small tensors with fp32 states, or quantized ones at
addresses that are not multiples of 16 bytes, one more each. No scalar is a compile-time constant, nothing waits for
the device, and what is allocated is a table of some kilobytes, kept from step to step.

The kernels also run under Triton's interpreter (TRITON_INTERPRET=1) on CPU tensors; that is how the tests run them.
"""

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.optim.checks import check_states
from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels.codec_triton import BIN_BITS, STRETCH, codec_tables
from halfbyte.optim.kernels.kernels_triton import step_blocks, step_plain
from halfbyte.optim.kernels.scalars_triton import prepare
from halfbyte.optim.kernels.table_triton import Chunking, Launch, Plan
from halfbyte.optim.rounding import Counter

MAX_BLOCK_SIZE = 8192
"""A block is reduced in registers: 8,192 values are 32 a thread in 8 warps."""

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PREPARE_TENSORS = 128
PLAIN_TILE = 1024

State = dict[str, Tensor]


class Tuning(NamedTuple):
    """How the quantized tensors are cut into programs; benchmarks/optim.py --tune measures what suits a GPU.

    tile       values a program steps at a time (at least one block), in `num_warps` warps.
    fold       pieces of a block that share a thread, see tile_triton.py.
    chunk      values a program steps.
    lanes      8-bit codes are decoded by shuffles, not by lookups.
    prefetch   the next tile is loaded ahead.
    maxnreg    registers a thread may take.
    """

    tile: int = 256
    num_warps: int = 1
    fold: int = 1
    chunk: int = 4096
    lanes: bool = True
    prefetch: bool = False
    maxnreg: int | None = None


TUNINGS = {
    "8bit": Tuning(chunk=8192),
    "4bit": Tuning(tile=1024, num_warps=2, fold=2, chunk=8192, maxnreg=80),
    "fp8": Tuning(tile=1024, num_warps=2, fold=2),
}
"""The fastest on an H200, as benchmarks/optim.py --tune found them (benchmarks/results)."""


def unavailable(device: torch.device, fmt: StateFormat, hyper: Hyper) -> str | None:
    """Why this path cannot serve a call, or None."""
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA devices, not on {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the Triton kernels need compute capability 8.0 or later; {device} has less"
    if fmt.block_size > MAX_BLOCK_SIZE:
        return f"blocks of {fmt.block_size} values do not fit the registers; the kernels take up to {MAX_BLOCK_SIZE}"
    if fmt.bits == 4 and fmt.block_size % 2:
        return f"with an odd block size ({fmt.block_size}) two blocks share a byte of 4-bit codes"
    return None


def step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    hyper: Hyper,
    fmt: StateFormat,
    *,
    counters: Sequence[Counter] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    cache: dict,
    tuning: Tuning | None = None,
) -> None:
    """See `halfbyte.optim.kernels.step`; tuning is for benchmarks."""
    if not params:
        return
    tuning = tuning or TUNINGS[fmt.name]
    if params[0].dtype != torch.bfloat16:
        counters = None
    device = params[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        plan = cache.get("plan")
        if plan is None or not plan.fits(params, grads, states, counters):
            plan = cache["plan"] = _plan(params, grads, states, counters, fmt, tuning)
        plan.keep_for_current_stream()
        _launch_prepare(plan, hyper, grad_scale, found_inf)
        flags = {
            "HAS_FOUND_INF": found_inf is not None,
            "P": DTYPES[params[0].dtype],
            "G": DTYPES[grads[0].dtype],
            "AMSGRAD": hyper.amsgrad,
            "DECOUPLED": hyper.decoupled or not hyper.weight_decay,
            "TINY_EPS": hyper.eps < 1e-16,
            "STOCHASTIC": counters is not None,
            "FLAT": plan.flat,
            "FAST": device.type == "cuda",
            "enable_fp_fusion": True,
        }
        for launch in plan.launches:
            if launch.kind.quantized:
                has_grad_factor = grad_scale is not None or hyper.maximize
                _launch_blocks(plan, launch, fmt, found_inf, has_grad_factor, flags, tuning)
            else:
                _launch_plain(plan, launch, found_inf, flags)


def _tile(fmt: StateFormat, tuning: Tuning) -> tuple[int, int, int]:
    """(FOLD, TILE_ROWS, WIDTH): the shape of a tile, see tile_triton.py."""
    block = triton.next_power_of_2(fmt.block_size)
    fold = tuning.fold if block >= 64 else 1
    return fold, max(1, tuning.tile // block), block // fold


def _plan(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    counters: Sequence[Counter] | None,
    fmt: StateFormat,
    tuning: Tuning,
) -> Plan:
    if params[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the optimizer's tables must be built before a CUDA graph is captured. Run one step with the same "
            "parameters on the side stream first, as torch asks for every optimizer."
        )
    check_states(params, states, fmt)
    tile = _tile(fmt, tuning)[1] * fmt.block_size
    chunking = {True: Chunking(tile, max(1, tuning.chunk // tile)), False: Chunking(PLAIN_TILE, 4)}
    plan = Plan(params, grads, states, counters, chunking)
    plan.set_grads([grad.data_ptr() for grad in grads])
    return plan


def _scalar(x: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """(value, None) of a float or a CPU tensor, (0, fp32 tensor) of one on a device: reading that would wait for it."""
    if not isinstance(x, Tensor):
        return float(x), None
    if x.device.type == "cpu":
        return float(x), None
    return 0.0, x.detach().to(device, torch.float32, non_blocking=True)


def _launch_prepare(plan: Plan, hyper: Hyper, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    lr, lr_at = _scalar(hyper.lr, plan.device)
    beta1, beta1_at = _scalar(hyper.beta1, plan.device)
    beta2, beta2_at = _scalar(hyper.beta2, plan.device)
    num_tensors = plan.grads.numel()
    unused = plan.scalars
    prepare[(triton.cdiv(num_tensors, PREPARE_TENSORS),)](
        plan.table, plan.scalars, num_tensors,
        lr, *_split(beta1), *_split(beta2), hyper.eps, hyper.weight_decay,
        unused if lr_at is None else lr_at,
        unused if beta1_at is None else beta1_at,
        unused if beta2_at is None else beta2_at,
        unused if grad_scale is None else grad_scale,
        unused if found_inf is None else found_inf,
        LR_IS_TENSOR=lr_at is not None, BETA1_IS_TENSOR=beta1_at is not None, BETA2_IS_TENSOR=beta2_at is not None,
        HAS_GRAD_SCALE=grad_scale is not None, HAS_FOUND_INF=found_inf is not None, MAXIMIZE=hyper.maximize,
        TENSORS=PREPARE_TENSORS,
    )  # fmt: skip


def _split(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers: Triton passes a float as fp32, and 1 - 0.999 needs more."""
    high = struct.unpack("f", struct.pack("f", x))[0]
    return high, x - high


def _launch_blocks(
    plan: Plan,
    launch: Launch,
    fmt: StateFormat,
    found_inf: Tensor | None,
    has_grad_factor: bool,
    flags: dict[str, Any],
    tuning: Tuning,
) -> None:
    device, name = plan.device, fmt.name
    fold, tile_rows, width = _tile(fmt, tuning)
    step_blocks[(launch.chunk_tensor.numel(),)](
        plan.table, plan.grads, plan.scalars, launch.chunk_tensor, launch.chunk_tiles,
        plan.scalars if found_inf is None else found_inf,
        codec_tables(name, device)[0],
        TAILS=launch.kind.tails, ALIGNED=launch.kind.aligned, FMT=name, BLOCK_SIZE=fmt.block_size,
        FOLD=fold, TILE_ROWS=tile_rows, WIDTH=width, NATIVE_E4M3=_casts_e4m3(device),
        STRETCH_M=STRETCH.get((name, True), 1.0), BITS_M=BIN_BITS.get((name, True), 0),
        STRETCH_V=STRETCH.get((name, False), 1.0), BITS_V=BIN_BITS.get((name, False), 0),
        HAS_GRAD_FACTOR=has_grad_factor, LANES=tuning.lanes, PREFETCH=tuning.prefetch,

        num_warps=max(tuning.num_warps, min(8, fold * width // 512)), maxnreg=tuning.maxnreg, **flags,
    )  # fmt: skip


def _casts_e4m3(device: torch.device) -> bool:
    """Whether the device has the instruction; the interpreter's cast is not used."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch_plain(plan: Plan, launch: Launch, found_inf: Tensor | None, flags: dict[str, Any]) -> None:
    step_plain[(launch.chunk_tensor.numel(),)](
        plan.table, plan.grads, plan.scalars, launch.chunk_tensor, launch.chunk_tiles,
        plan.scalars if found_inf is None else found_inf, TILE=PLAIN_TILE, **flags,
    )  # fmt: skip
