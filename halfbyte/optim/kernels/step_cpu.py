"""The fast step on a CPU: numba kernels over a chunk table, on as many threads as torch would use.

Contract: `halfbyte.optim.kernels.step`; needs the extra `halfbyte[cpu]`, and importing this file fails without it. The
kernels release the GIL, so plain Python threads, started for one step, share the chunks. Rejected: numba's parallel
loops, whose threading layers abort when two threads enter them or a process forks, and which double the compile time.
The first step of a machine compiles for some seconds; numba keeps the result beside this file (or, where that is not
writable, in the user's cache folder).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from halfbyte.optim.checks import check_states
from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels.codec_cpu import FORMAT_CODE
from halfbyte.optim.kernels.step_cpu_tile import Room, advance, new_room, run
from halfbyte.optim.kernels.table_cpu import (
    BFLOAT16,
    COLUMNS,
    FLOAT16,
    FLOAT32,
    GRAD,
    NUMEL,
    PARAM,
    QUANTIZED,
    SEED,
    STEP,
)
from halfbyte.optim.kernels.table_cpu import MOMENTS as FIRST_MOMENT
from halfbyte.optim.kernels.whereabouts import Whereabouts, addresses
from halfbyte.optim.rounding import Counter

TILE = 1024  # values; with two moments 18 KB, so it and the tables fit a 32 KB first-level cache. 512: 5% slower
BATCH = 1 << 18  # values a thread takes at a time: 0.5 ms of work
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

State = dict[str, Tensor]


def unavailable(device: torch.device, fmt: StateFormat, hyper: Hyper) -> str | None:
    """Why this path cannot serve a call, or None."""
    if device.type != "cpu":
        return f"the numba kernels run on the CPU, not on {device}"
    return "NUMBA_DISABLE_JIT is set" if getattr(numba.config, "DISABLE_JIT", False) else None


class Plan(NamedTuple):
    """What a step needs and the next one can use again.

    whereabouts  of parameters and states: the plan is valid while they stay.
    table    [T, len(COLUMNS)] int64, gradients' addresses written anew in every step; items [I, 3] int64 (tensor,
             start, end); batches: ends of the runs of items that a thread takes at a time.
    """

    whereabouts: Whereabouts
    table: np.ndarray
    items: np.ndarray
    batches: list[int]


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
) -> None:
    """See `halfbyte.optim.kernels.step`."""
    if not params or (found_inf is not None and found_inf.item()):
        return
    if grads[0].dtype not in KINDS:
        grads = [grad.float() for grad in grads]
    stochastic = counters is not None and params[0].dtype == torch.bfloat16
    counters = counters if stochastic else None
    plan = cache.get("plan")
    if plan is None or not plan.whereabouts.hold(params, states, counters, param_addresses, states_stay):
        plan = cache["plan"] = _plan(params, states, fmt, hyper.amsgrad, counters, param_addresses, states_stay)
    plan.table[:, GRAD] = addresses(grads)
    lr, beta1, beta2 = float(hyper.lr), float(hyper.beta1), float(hyper.beta2)
    factors = np.empty((len(params), 2), np.float32)
    keys = np.empty((len(params), 2), np.uint32)
    advance(plan.table, lr, beta1, beta2, factors, keys)
    decay = hyper.weight_decay
    keep, l2 = (1 - lr * decay, 0.0) if hyper.decoupled else (1.0, decay)
    weights = tuple(np.float32(x) for x in (keep, 1 - beta1, beta2, 1 - beta2, hyper.eps, l2))
    settings = (
        (KINDS[params[0].dtype], KINDS[grads[0].dtype]),
        FORMAT_CODE[fmt.name],
        fmt.block_size,
        weights,
        np.float32(1.0 if grad_scale is None else grad_scale.item()),
        (hyper.maximize, stochastic),
    )
    _share_out(
        plan,
        lambda: new_room(3 if hyper.amsgrad else 2, _tile(fmt.block_size), fmt.block_size),
        lambda items, room: run(plan.table, items, room, factors, keys, *settings),
    )
    torch.autograd.graph.increment_version(params)


def _tile(block_size: int) -> int:
    """About TILE values: whole blocks, and an even number, so that 4-bit tiles start at a byte."""
    tile = block_size * max(1, TILE // block_size)
    return tile if tile % 2 == 0 else 2 * tile


def _plan(
    params: Sequence[Tensor],
    states: Sequence[State],
    fmt: StateFormat,
    amsgrad: bool,
    counters: Sequence[Counter] | None,
    param_addresses: list[int] | None,
    states_stay: bool,
) -> Plan:
    check_states(params, states, fmt)
    whereabouts = Whereabouts(params, states, counters, param_addresses, states_stay)
    table = np.zeros((len(params), len(COLUMNS)), np.int64)
    table[:, PARAM], table[:, NUMEL] = whereabouts.params, whereabouts.numels
    names = [name + suffix for name in MOMENTS[: 3 if amsgrad else 2] for suffix in ("", "_scale")]
    for row, state in zip(table, states, strict=True):
        row[STEP], row[QUANTIZED] = state["step"].data_ptr(), "exp_avg_scale" in state
        row[FIRST_MOMENT : FIRST_MOMENT + len(names)] = [
            state[name].data_ptr() if name in state else 0 for name in names
        ]
    if counters is not None:
        table[:, SEED:] = np.array(counters, np.int64)
    return Plan(whereabouts, table, *_cut(table[:, NUMEL], _tile(fmt.block_size)))


def _cut(numels: np.ndarray, tile: int) -> tuple[np.ndarray, list[int]]:
    """(items [I, 3], batches): tensors cut into chunks of whole tiles, chunks put together to about BATCH values."""
    chunk = tile * max(1, BATCH // tile)
    items, batches, taken = [], [], 0
    for t, numel in enumerate(numels.tolist()):
        for start in range(0, numel, chunk):
            end = min(start + chunk, numel)
            items.append((t, start, end))
            taken += end - start
            if taken >= BATCH:
                batches.append(len(items))
                taken = 0
    if taken:
        batches.append(len(items))
    return np.array(items, np.int64).reshape(-1, 3), batches


def _share_out(plan: Plan, new_room: Callable[[], Room], work: Callable[[np.ndarray, Room], None]) -> None:
    """Run `work` on every batch; threads, each with its room, draw the next one from a common iterator. The first error
    is raised."""
    bounds = iter(list(pairwise([0, *plan.batches])))  # none where every tensor is empty
    errors: list[BaseException] = []

    def draw(bounds: Iterator[tuple[int, int]]) -> None:
        try:
            room = new_room()
            for start, end in bounds:
                work(plan.items[start:end], room)
        except BaseException as error:
            errors.append(error)

    num_helpers = min(torch.get_num_threads(), len(plan.batches)) - 1
    helpers = [threading.Thread(target=draw, args=(bounds,)) for _ in range(num_helpers)]
    for helper in helpers:
        helper.start()
    draw(bounds)
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
