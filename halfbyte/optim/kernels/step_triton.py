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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from halfbyte.optim.checks import check_states
from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels.codec_triton import BIN_BITS, STRETCH, codec_tables
from halfbyte.optim.kernels.kernels_triton import step_blocks, step_plain
from halfbyte.optim.kernels.launch_triton import Launch, compile_together
from halfbyte.optim.kernels.scalars_triton import prepare
from halfbyte.optim.kernels.table_triton import Chunking, Part, Plan
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


class Settings(NamedTuple):
    """What a step's kernels are compiled for, beside the format: compile-time arguments under their own names."""

    P: Any
    G: Any
    AMSGRAD: bool
    DECOUPLED: bool
    TINY_EPS: bool
    STOCHASTIC: bool
    MAXIMIZE: bool
    HAS_GRAD_SCALE: bool
    HAS_FOUND_INF: bool
    LR_IS_TENSOR: bool
    BETA1_IS_TENSOR: bool
    BETA2_IS_TENSOR: bool


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
    param_addresses: list[int] | None = None,
    states_stay: bool = False,
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
        if plan is None or not plan.fits(params, grads, states, counters, param_addresses, states_stay):
            plan = cache["plan"] = _plan(params, grads, states, counters, fmt, tuning, param_addresses, states_stay)
        plan.keep_for_current_stream()
        lr, beta1, beta2 = (_scalar(x, device) for x in (hyper.lr, hyper.beta1, hyper.beta2))
        settings = Settings(
            P=DTYPES[params[0].dtype],
            G=DTYPES[grads[0].dtype],
            AMSGRAD=hyper.amsgrad,
            DECOUPLED=hyper.decoupled or not hyper.weight_decay,
            TINY_EPS=hyper.eps < 1e-16,
            STOCHASTIC=counters is not None,
            MAXIMIZE=hyper.maximize,
            HAS_GRAD_SCALE=grad_scale is not None,
            HAS_FOUND_INF=found_inf is not None,
            LR_IS_TENSOR=lr[1] is not None,
            BETA1_IS_TENSOR=beta1[1] is not None,
            BETA2_IS_TENSOR=beta2[1] is not None,
        )
        arguments = _arguments(plan, fmt, hyper, (lr, beta1, beta2), grad_scale, found_inf)
        launches = plan.compiled.get(settings)
        if launches is None:
            launches = plan.compiled[settings] = _launches(plan, fmt, settings, tuning)
            kernels = settings, tuning, *(part.kind for part in plan.parts)
            if kernels not in cache.setdefault("compiled", set()):
                compile_together(launches, arguments, device)
                cache["compiled"].add(kernels)
        for launch, args in zip(launches, arguments, strict=True):
            launch(*args)


@lru_cache
def _tile(fmt: StateFormat, tuning: Tuning) -> tuple[int, int, int]:
    """(FOLD, TILE_ROWS, WIDTH): the shape of a tile, see tile_triton.py."""
    block = 1 << (fmt.block_size - 1).bit_length()
    fold = tuning.fold if block >= 64 else 1
    return fold, max(1, tuning.tile // block), block // fold


def _plan(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    counters: Sequence[Counter] | None,
    fmt: StateFormat,
    tuning: Tuning,
    param_addresses: list[int] | None,
    states_stay: bool,
) -> Plan:
    if params[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the optimizer's tables must be built before a CUDA graph is captured. Run one step with the same "
            "parameters on the side stream first, as torch asks for every optimizer."
        )
    check_states(params, states, fmt)
    tile = _tile(fmt, tuning)[1] * fmt.block_size
    chunking = {True: Chunking(tile, max(1, tuning.chunk // tile)), False: Chunking(PLAIN_TILE, 4)}
    plan = Plan(params, grads, states, counters, chunking, param_addresses, states_stay)
    plan.set_grads([grad.data_ptr() for grad in grads])
    return plan


def _scalar(x: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """(value, None) of a float or a CPU tensor, (0, fp32 tensor) of one on a device: reading that would wait for it."""
    if not isinstance(x, Tensor):
        return float(x), None
    if x.device.type == "cpu":
        return float(x), None
    return 0.0, x.detach().to(device, torch.float32, non_blocking=True)


def _launches(plan: Plan, fmt: StateFormat, settings: Settings, tuning: Tuning) -> list[Launch]:
    """Of `prepare`, then of each part of the plan."""
    chosen = settings._asdict()
    fast = plan.device.type == "cuda"
    constants = {name: chosen[name] for name in prepare.arg_names if name in chosen} | {"TENSORS": PREPARE_TENSORS}
    launches = [Launch(prepare, -(-plan.grads.numel() // PREPARE_TENSORS), constants)]
    for part in plan.parts:
        kernel = step_blocks if part.kind.quantized else step_plain
        constants = {name: chosen[name] for name in kernel.arg_names if name in chosen}
        constants |= {"FLAT": plan.flat, "FAST": fast}
        options: dict[str, Any] = {"enable_fp_fusion": True}
        if part.kind.quantized:
            constants |= _block_constants(part, fmt, settings, tuning, plan.device)
            warps = max(tuning.num_warps, min(8, constants["FOLD"] * constants["WIDTH"] // 512))
            options |= {"num_warps": warps, "maxnreg": tuning.maxnreg}
        else:
            constants["TILE"] = PLAIN_TILE
        launches.append(Launch(kernel, part.chunk_tensor.numel(), constants, **options))
    return launches


def _block_constants(
    part: Part, fmt: StateFormat, settings: Settings, tuning: Tuning, device: torch.device
) -> dict[str, Any]:
    """What `step_blocks` is told beside the settings."""
    fold, tile_rows, width = _tile(fmt, tuning)
    return {
        "TAILS": part.kind.tails,
        "ALIGNED": part.kind.aligned,
        "FMT": fmt.name,
        "BLOCK_SIZE": fmt.block_size,
        "FOLD": fold,
        "TILE_ROWS": tile_rows,
        "WIDTH": width,
        "NATIVE_E4M3": _casts_e4m3(device),
        "STRETCH_M": STRETCH.get((fmt.name, True), 1.0),
        "BITS_M": BIN_BITS.get((fmt.name, True), 0),
        "STRETCH_V": STRETCH.get((fmt.name, False), 1.0),
        "BITS_V": BIN_BITS.get((fmt.name, False), 0),
        "HAS_GRAD_FACTOR": settings.HAS_GRAD_SCALE or settings.MAXIMIZE,
        "LANES": tuning.lanes,
        "PREFETCH": tuning.prefetch,
    }


def _arguments(
    plan: Plan,
    fmt: StateFormat,
    hyper: Hyper,
    scalars: Sequence[tuple[float, Tensor | None]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> list[tuple]:
    """Of `prepare`, then of each part's kernel."""
    (lr, lr_at), (beta1, beta1_at), (beta2, beta2_at) = scalars
    unused = plan.scalars
    pointers = [unused if at is None else at for at in (lr_at, beta1_at, beta2_at, grad_scale, found_inf)]
    arguments: list[tuple] = [
        (
            plan.table, plan.scalars, plan.grads.numel(),
            lr, *_split(beta1), *_split(beta2), float(hyper.eps), float(hyper.weight_decay), *pointers,
        )
    ]  # fmt: skip
    for part in plan.parts:
        tables = (codec_tables(fmt.name, plan.device)[0],) if part.kind.quantized else ()
        arguments.append(
            (plan.table, plan.grads, plan.scalars, part.chunk_tensor, part.chunk_tiles, pointers[-1], *tables)
        )
    return arguments


@lru_cache
def _split(x: float) -> tuple[float, float]:
    """x as the sum of two fp32 numbers: Triton passes a float as fp32, and 1 - 0.999 needs more."""
    high = struct.unpack("f", struct.pack("f", x))[0]
    return high, x - high


def _casts_e4m3(device: torch.device) -> bool:
    """Whether the device has the instruction; the interpreter's cast is not used."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
