"""States in CPU memory: brought to the GPU a bucket at a time, stepped there, and taken back, all three at once.

`AdamW8bit(params, offload_states=True)` stays an ordinary optimizer: parameters, gradients, schedulers, clipping and
state dicts are as always, only the moments live in pinned CPU memory. While bucket i is stepped, bucket i + 1 is copied
in and bucket i - 1 out, on two streams. An 8-bit step moves 2.03 bytes a parameter each way, a 4-bit one 1.06.

Rejected: stepping on the CPU (torchao's CPUOffloadOptimizer, DeepSpeed's CPUAdam). It moves as much (2 bytes of
gradient down, 2 of parameter up) and then computes 50 times slower than the GPU would.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from halfbyte.optim.state import State

BUCKET_BYTES = 64 * 2**20
"""State bytes copied at a time: 1.3 ms of PCIe 5; up to three buckets are on the device at once."""


def to_host(state: State) -> State:
    """A state with its codes and scales in (pinned, if there is a GPU) CPU memory. `step`, and fp32 moments of small
    parameters, stay where they are: a copy of some kilobytes costs as much as one of some hundred."""
    if "exp_avg_scale" not in state:
        return state
    pin = torch.cuda.is_available()
    return {
        name: value if name == "step" or value.device.type == "cpu" else _host_copy(value, pin)
        for name, value in state.items()
    }


def _host_copy(value: Tensor, pin: bool) -> Tensor:
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=pin)
    return host.copy_(value)


class Streams:
    """The two copy streams of a CUDA device. On any other device copies are made in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def begin(self) -> None:
        """What the last step took out must be there before this one copies it in."""
        if self.cuda:
            self.inward.wait_stream(self.outward)

    def copy_in(self, state: State) -> State:
        """Device copies of a state's moments, on the inward stream."""
        with torch.cuda.stream(self.inward) if self.cuda else nullcontext():
            return {
                name: value if self._stays(name, value) else _device_copy(value, self.device)
                for name, value in state.items()
            }

    def _stays(self, name: str, value: Tensor) -> bool:
        """Whether a tensor is on the device for good."""
        return name == "step" or (self.cuda and value.device.type == "cuda")

    def before_step(self, states: Sequence[State]) -> None:
        """The stepping stream waits for the copies, whose memory it then uses."""
        if not self.cuda:
            return
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.inward)
        for state in states:
            for value in state.values():
                value.record_stream(current)

    def copy_out(self, states: Sequence[State], hosts: Sequence[State]) -> None:
        """The stepped moments go back, on the outward stream."""
        if self.cuda:
            self.outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.outward) if self.cuda else nullcontext():
            for state, host in zip(states, hosts, strict=True):
                for name, value in state.items():
                    if value is not host[name]:
                        host[name].copy_(value, non_blocking=True)
                        if self.cuda:
                            value.record_stream(self.outward)

    def synchronize(self) -> None:
        """Wait until the CPU copies are whole: before anybody reads them on the host."""
        if self.cuda:
            self.outward.synchronize()


def _device_copy(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(value, device=device, pin_memory=False).copy_(value, non_blocking=True)


def buckets(states: Sequence[State], limit_bytes: int) -> Iterator[list[int]]:
    """Places in the list, in runs of about `limit_bytes` of moments (a larger state is a run of its own)."""
    run: list[int] = []
    size = 0
    for i, state in enumerate(states):
        own = sum(value.numel() * value.element_size() for value in state.values())
        if run and size + own > limit_bytes:
            yield run
            run, size = [], 0
        run.append(i)
        size += own
    if run:
        yield run


def step_offloaded(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[State],
    step: Callable[[list[Tensor], list[Tensor], list[State], list[int]], Any],
    streams_of: dict[torch.device, Streams],
    limit_bytes: int = BUCKET_BYTES,
) -> None:
    """Step parameters whose states lie in CPU memory, one device after the other.

    step    called with (params, grads, device states, places in the lists) for one bucket after the other.
    streams_of  keeps each device's streams from step to step.
    """
    by_device: dict[torch.device, list[int]] = {}
    for i, param in enumerate(params):
        by_device.setdefault(param.device, []).append(i)
    for device, members in by_device.items():
        if device not in streams_of:
            streams_of[device] = Streams(device)
        streams = streams_of[device]
        streams.begin()
        runs = [[members[i] for i in run] for run in buckets([states[i] for i in members], limit_bytes)]
        coming = [streams.copy_in(states[i]) for i in runs[0]]
        for place, run in enumerate(runs):
            here = coming
            streams.before_step(here)
            if place + 1 < len(runs):  # issued before the step, so that the copy runs beside it
                coming = [streams.copy_in(states[i]) for i in runs[place + 1]]
            step([params[i] for i in run], [grads[i] for i in run], here, run)
            streams.copy_out(here, [states[i] for i in run])
