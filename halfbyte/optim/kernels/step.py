"""One step of Adam or AdamW over a param group: the contract of the three paths, and the choice between them.

    step(params, grads, states, hyper, fmt, counters=..., grad_scale=..., found_inf=..., cache=...)

Paths are modules beside this one with a function of the same name and arguments: `step_ref` (plain PyTorch, any
device, the definition), `step_triton` (CUDA, compute capability 8.0 and up) and `step_cpu` (numba). The two fast ones
also have `unavailable(device, fmt, hyper) -> str | None`, the reason why they cannot serve a call (None: they can). A
path gets params of ONE device, ONE parameter dtype and ONE gradient dtype, and:

params    list of local contiguous tensors of any shape (seen flat, row-major); bf16, fp16 or fp32; updated in place.
          A numel of 0 is possible, and one above 2^31 too.
grads     list of contiguous tensors of the same numels; fp32, bf16 or fp16. Not written.
states    list of dicts of plain tensors on the param's device, updated IN PLACE (their storage never changes):
            step              fp32 0-d; the path adds 1 (unless found_inf) and uses the sum. On the parameter's device.
          and, for a quantized parameter (state_ops.py defines codes and scales),
            exp_avg           codes, uint8 [fmt.num_bytes(numel)]
            exp_avg_scale     fp32 [fmt.num_blocks(numel)]
            exp_avg_sq, exp_avg_sq_scale            the same, unsigned
            max_exp_avg_sq, max_exp_avg_sq_scale    the same, if amsgrad
          or, for a parameter that is not quantized ("exp_avg_scale" not in state), without the scales and with
          fp32 tensors of the parameter's shape. A fresh state is all zeros: scale 0 means that the block is zero.
          Odd numels of 4 bits: the low nibble of the last byte is unused and written as 0.
hyper     `Hyper`: lr and betas may be 0-d tensors.
fmt       `StateFormat` (name, block size); any positive block size must work, on `step_ref` if not on a fast path.
counters  list of `Counter` (rounding.py), or None when hyper.stochastic is False. Used for bf16 parameters only.
grad_scale, found_inf   None or fp32 tensors of one element (`GradScaler`): the gradient is g / grad_scale; where
          found_inf is 1 nothing changes, `step` included. No host synchronization on a GPU.
cache     a dict that belongs to this param group, device and dtypes, empty at first: a path keeps its tables there.
          It dies with the optimizer, is never saved, and is emptied when states are loaded. The path itself must
          notice that a gradient, parameter or state moved (data_ptr), and that lists got other members.
param_addresses, states_stay   what the caller knows already (whereabouts.py): the parameters' addresses; that the
          states, if they come in the same list object as in the last call with this cache, have not moved since.

Maths, per element in fp32, in the order of torch's single-tensor AdamW:

    g = grad / grad_scale;  g = -g if maximize
    decoupled: p = p - lr * weight_decay * p          else: g = g + weight_decay * p
    m = dequantize(exp_avg);     m = m + (1 - beta1) * (g - m)
    v = dequantize(exp_avg_sq);  v = beta2 * v + (1 - beta2) * g * g
    amsgrad: d = max(dequantize(max_exp_avg_sq), v)   else: d = v
    p = p - (lr / (1 - beta1^step)) * m / (sqrt(d) / sqrt(1 - beta2^step) + eps)
    p is rounded to its dtype; m, v (and d, if amsgrad) are quantized: the update uses the unquantized ones

An element of which m, v or d is not finite is left out of every scale of its block and stored as m = 0 (the zero
code) and v, d = the largest code (top_code). Its p is what the formula says (NaN after a NaN or Inf gradient;
unchanged after a finite gradient whose square overflows). Unquantized states store NaN and Inf as torch does.

A fast path may differ from `step_ref` by rounding: parameters by a few ulp, a code by one where y lies within 1e-5
(relative) of a midpoint, a scale by a few ulp.
"""

from collections.abc import Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels import step_ref
from halfbyte.optim.kernels.whereabouts import addresses
from halfbyte.optim.rounding import Counter

State = dict[str, Tensor]


def choose_path(device: torch.device, dtype: torch.dtype, fmt: StateFormat, hyper: Hyper) -> Any:
    """The module that serves parameters of a device and dtype: the fast one where it is available, else `step_ref`."""
    name = {"cuda": "step_triton", "cpu": "step_cpu"}.get(device.type)
    if name is None or dtype == torch.float64:
        return step_ref
    try:
        fast = import_module(f"halfbyte.optim.kernels.{name}")
    except ImportError:  # Triton or numba is not installed
        return step_ref
    return step_ref if fast.unavailable(device, fmt, hyper) else fast


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
    states_stay: bool = False,
    path: Any = None,
) -> None:
    """Step mixed lists: sorts them by device and dtypes, makes non-contiguous tensors contiguous, calls a path.

    A tensor that is not contiguous (channels-last, a strided view) is copied before and after, one at a time.
    path  a module to use instead of `choose_path`'s.
    """
    buckets, param_addresses = _buckets(params, grads, cache)
    for key, members in buckets.items():
        device = key[0]
        whole = len(members) == len(params)
        own = params if whole else [params[i] for i in members]
        own_grads = grads if whole else [grads[i] for i in members]
        flat = own if key[3] is None else [param.contiguous() for param in own]
        (path or choose_path(device, key[1], fmt, hyper)).step(
            flat,
            own_grads if key[3] is None else [grad.contiguous() for grad in own_grads],
            states if whole else [states[i] for i in members],
            hyper,
            fmt,
            counters=counters if whole or counters is None else [counters[i] for i in members],
            grad_scale=None if grad_scale is None else grad_scale.to(device, torch.float32, non_blocking=True),
            found_inf=None if found_inf is None else found_inf.to(device, torch.float32, non_blocking=True),
            cache=cache.setdefault(key, {}),
            param_addresses=param_addresses,
            states_stay=states_stay,
        )
        if key[3] is not None:
            for param, new in zip(own, flat, strict=True):
                if new is not param:
                    param.copy_(new)


def _buckets(
    params: Sequence[Tensor], grads: Sequence[Tensor], cache: dict
) -> tuple[dict[tuple, Sequence[int]], list[int] | None]:
    """Places in the lists by (device, parameter dtype, gradient dtype, None or the place if not contiguous).

    The usual case, all alike and contiguous, is remembered: parameters at the same addresses are what they were, so
    only the gradients, which are new in every step, are looked at again. 0.07 ms for 448 parameters. The parameters'
    addresses come along in that case: the same list object as long as they stay.
    """
    now, dtypes = addresses(params), set(map(_dtype, grads))
    contiguous = all(map(Tensor.is_contiguous, grads))
    if contiguous and cache.get("alike", (None, None))[:2] == (now, dtypes):
        return cache["alike"][2], cache["alike"][0]
    kinds = {*zip(map(_device, params), map(_dtype, params), map(_dtype, grads), strict=True)}
    if contiguous and len(kinds) == 1 and all(map(Tensor.is_contiguous, params)):
        found: dict[tuple, Sequence[int]] = {(*kinds.pop(), None): range(len(params))}
        cache["alike"] = now, dtypes, found
        return found, now
    buckets: dict[tuple, list[int]] = {}
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        plain = param.is_contiguous() and grad.is_contiguous()
        buckets.setdefault((param.device, param.dtype, grad.dtype, None if plain else i), []).append(i)
    return dict(buckets), None


_device, _dtype = attrgetter("device"), attrgetter("dtype")
