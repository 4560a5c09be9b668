"""The step in plain PyTorch: the definition, and the path of machines without a compiler.

Works through each tensor in chunks of 32,768 values (128 blocks of 256): half a dozen fp32 temporaries stay in the
cache and below 1 MB together, and torch, which splits what is longer (reductions: `block_amax`), needs no threads. What
can be done in place is. Rejected: torch._foreach over whole tensors, which needs several fp32 copies of every
parameter; scratch kept from chunk to chunk (`out=` measured no faster: the allocator returns the same warm memory).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfbyte.optim.formats import StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.rounding import Counter, random_bits, round_stochastic
from halfbyte.optim.state_ops import block_amax, dequantize, quantize, quantize_finite_, scalar

CHUNK = 32768
AHEAD = 64  # chunks whose views are made at once
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

State = dict[str, Tensor]


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
    cache: dict | None = None,
    param_addresses: list[int] | None = None,
    states_stay: bool = False,
) -> None:
    """See `halfbyte.optim.kernels.step`, whose contract this defines. The last three are not used."""
    if found_inf is not None and found_inf.item():
        return
    hyper = hyper._replace(lr=float(hyper.lr), beta1=float(hyper.beta1), beta2=float(hyper.beta2))
    scale = None if grad_scale is None else grad_scale.item()
    for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
        state["step"] += 1
        counter = counters[i] if counters is not None and param.dtype == torch.bfloat16 else None
        _step_tensor(param.view(-1), grad.view(-1), state, hyper, fmt, counter, scale)


def _step_tensor(
    param: Tensor,
    grad: Tensor,
    state: State,
    hyper: Hyper,
    fmt: StateFormat,
    counter: Counter | None,
    grad_scale: float | None,
) -> None:
    """One flat parameter, chunk by chunk; a chunk is whole blocks and an even number of values."""
    num_steps, quantized = int(state["step"].item()), "exp_avg_scale" in state
    chunk = fmt.block_size * max(2, CHUNK // fmt.block_size // 2 * 2)
    for start, (param_chunk, grad_chunk, *stored) in _chunks(param, grad, state, fmt, chunk):
        grad_chunk = grad_chunk.to(torch.float32)
        if grad_scale is not None:
            grad_chunk = grad_chunk / grad_scale
        moments = _read(stored, fmt, param_chunk.numel(), quantized)
        wide = param_chunk.to(torch.float64 if param.dtype == torch.float64 else torch.float32)
        moments = adam_update_(wide, grad_chunk, moments, hyper, num_steps)
        if counter is not None:
            end = start + wide.numel()
            wide = round_stochastic(wide, random_bits(counter, num_steps, start, end, param.device))
        if wide is not param_chunk:
            param_chunk.copy_(wide)
        _write(stored, fmt, moments, quantized)


def _chunks(
    param: Tensor, grad: Tensor, state: State, fmt: StateFormat, chunk: int
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """First value, then views of parameter, gradient and what is stored of each moment: `(codes, scale)`s or values.

    Cut AHEAD chunks at a time: `split` makes a view in about half the time of a slice, and a chunk has six of them.
    """
    whole: list[tuple[Tensor, int]] = [(param, chunk), (grad, chunk)]
    for name in MOMENTS:
        if name + "_scale" in state:
            whole += [(state[name], chunk * fmt.bits // 8), (state[name + "_scale"], chunk // fmt.block_size)]
        elif name in state:
            whole.append((state[name].view(-1), chunk))
    for first in range(0, -(-param.numel() // chunk), AHEAD):
        views = [tensor[first * size : (first + AHEAD) * size].split(size) for tensor, size in whole]
        for i, chunks in enumerate(zip(*views, strict=True), first):
            yield i * chunk, chunks


def adam_update_(param: Tensor, grad: Tensor, moments: list[Tensor], hyper: Hyper, num_steps: int) -> list[Tensor]:
    """Adam's formula on fp32 tensors: updates the parameter and the moments in place; the new moments."""
    lr, beta1, beta2 = float(hyper.lr), float(hyper.beta1), float(hyper.beta2)
    if hyper.maximize:
        grad = -grad
    if hyper.weight_decay and hyper.decoupled:
        param.mul_(1 - lr * hyper.weight_decay)
    elif hyper.weight_decay:
        grad = grad + hyper.weight_decay * param.float()
    exp_avg = moments[0].lerp_(grad, 1 - beta1)
    exp_avg_sq = moments[1].mul_(scalar(beta2, torch.float32)).addcmul_(grad, grad, value=1 - beta2)
    new = [exp_avg, exp_avg_sq]
    if hyper.amsgrad:
        new.append(torch.maximum(moments[2], exp_avg_sq))
    # sqrt, as 1 / rsqrt (1 ulp off): torch's sqrt splits from 2,048 values on, and on a busy CPU its threads wait
    # milliseconds for each other.
    denominator = new[-1].rsqrt().reciprocal_().div_(scalar((1 - beta2**num_steps) ** 0.5, torch.float32))
    denominator.add_(scalar(hyper.eps, torch.float32))
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**num_steps))
    return new


def _read(stored: Sequence[Tensor], fmt: StateFormat, numel: int, quantized: bool) -> list[Tensor]:
    """The moments in fp32: exp_avg, exp_avg_sq[, max_exp_avg_sq]."""
    if not quantized:
        return [values.clone() for values in stored]
    pairs = zip(stored[::2], stored[1::2], strict=True)
    return [dequantize(codes, scale, fmt, numel, signed=i == 0) for i, (codes, scale) in enumerate(pairs)]


def _write(stored: Sequence[Tensor], fmt: StateFormat, moments: list[Tensor], quantized: bool) -> None:
    """Store the moments, which are overwritten."""
    if not quantized:
        for values, moment in zip(stored, moments, strict=True):
            values.copy_(moment)
        return
    amaxes = [block_amax(moment, fmt.block_size, signed=i == 0) for i, moment in enumerate(moments)]
    largest = [amax.amax().item() for amax in amaxes]
    bad = None if all(map(math.isfinite, largest)) else ~torch.stack([moment.isfinite() for moment in moments]).all(0)
    for i, (moment, amax, top) in enumerate(zip(moments, amaxes, largest, strict=True)):
        codes, scale = stored[2 * i : 2 * i + 2]
        if bad is None:
            quantize_finite_(moment, amax, fmt, codes, scale, signed=i == 0, largest=top)
        else:
            codes[:], scale[:] = quantize(moment, fmt, signed=i == 0, bad=bad)
