"""The pointer table and the chunk table of a step: which program steps which part of which tensor.

A plan stays valid while parameters and states lie where they lay (whereabouts.py says how that is known).
Gradients move at every step of a loop that frees them (`zero_grad` does), so their addresses are a column of their own:
one small copy from pinned memory, asynchronous, in stream order. Rejected: addresses as kernel arguments (a few hundred
at most fit, and each launch would pay for all).
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.optim.kernels.whereabouts import Whereabouts, addresses
from halfbyte.optim.rounding import Counter

NUMEL, FIRST_CHUNK = 8, 9  # columns, as in kernels_triton.py
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ALIGNMENT = 16  # bytes of the widest load

State = dict[str, Tensor]


class Chunking(NamedTuple):
    """How a launch cuts its tensors: a program steps `tiles` tiles of `tile` values."""

    tile: int
    tiles: int


class Part(NamedTuple):
    """Tensors that share a launch.

    kind          which kernel and what it may assume.
    chunk_tensor  int32 [programs], the tensor of each.
    chunk_tiles   tiles a program steps.
    """

    kind: "Kind"
    chunk_tensor: Tensor
    chunk_tiles: int


class Kind(NamedTuple):
    """quantized: codes, not fp32 states; aligned: all addresses are multiples of 16; tails: last, partial tiles."""

    quantized: bool
    aligned: bool
    tails: bool


def is_aligned(pointers: Sequence[int]) -> bool:
    return not reduce(operator.or_, pointers, 0) % ALIGNMENT


class Plan:
    """Tables of one call's tensors on their device.

    table     int64 [tensors, COLUMNS], see kernels_triton.py for the columns.
    grads     int64 [tensors], addresses.
    scalars   fp32 [tensors, 16], written by the kernel `prepare`.
    parts     one for quantized tensors; one each, where there are any, for tails, unaligned ones and fp32 states.
    compiled  a step's launches by what they are compiled for; step_triton.py fills it.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        counters: Sequence[Counter] | None,
        chunking: dict[bool, Chunking],
        param_addresses: list[int] | None = None,
        states_stay: bool = False,
    ) -> None:
        self.whereabouts = Whereabouts(params, states, counters, param_addresses, states_stay)
        self.grad_key: list[int] = []
        self.device = params[0].device
        self.flat = counters is None or all(c.inner >= p.numel() for c, p in zip(counters, params, strict=True))
        rows: list[list[int]] = []
        members: dict[Kind, list[int]] = {}
        for i, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
            pointers = _moment_pointers(state)
            counter = tuple(counters[i]) if counters is not None else (0, 0, 0, 0)
            rows.append([param.data_ptr(), *pointers, state["step"].data_ptr(), param.numel(), 0, *counter, 0, 0])
            quantized = "exp_avg_scale" in state
            aligned = is_aligned([param.data_ptr(), grad.data_ptr(), *pointers])
            whole, rest = divmod(param.numel(), chunking[quantized].tile)
            if whole or (rest and not quantized):  # the kernel of fp32 states masks every tile
                members.setdefault(Kind(quantized, aligned and quantized, False), []).append(i)
            if rest and quantized:
                members.setdefault(Kind(quantized, aligned, True), []).append(i)
        self.parts = [self._part(kind, some, rows, chunking[kind.quantized]) for kind, some in sorted(members.items())]
        self.compiled: dict[Any, list] = {}
        self.grads_aligned = is_aligned(addresses(grads))
        self.table = self._upload(torch.tensor(rows, dtype=torch.int64, device="cpu"))
        self.grads = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        self.scalars = torch.empty(len(rows), 16, dtype=torch.float32, device=self.device)
        self._spare: Tensor | None = self._pinned(torch.zeros(len(rows), dtype=torch.int64, device="cpu"))
        self._captured: list[Tensor] = []
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def fits(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        counters: Sequence[Counter] | None,
        param_addresses: list[int] | None,
        states_stay: bool,
    ) -> bool:
        """Whether the tables still describe these tensors; brings the gradients' addresses up to date if so."""
        if not self.whereabouts.hold(params, states, counters, param_addresses, states_stay):
            return False
        now = addresses(grads)
        if now != self.grad_key:
            if is_aligned(now) != self.grads_aligned or not self.grads_aligned:
                return False
            self.set_grads(now)
        return True

    def set_grads(self, pointers: list[int]) -> None:
        """Write the gradients' addresses to the device, in stream order."""
        fresh = torch.tensor(pointers, dtype=torch.int64, device="cpu")
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A replay reads this memory again, so it must stay; and nothing can be pinned while capturing.
            if self._spare is None:
                raise RuntimeError(
                    "gradients moved between two captures of this optimizer into CUDA graphs. Step once outside a "
                    "capture before the next, or keep the gradients in place (zero_grad(set_to_none=False))."
                )
            self._spare.copy_(fresh)
            self._captured.append(self._spare)
            self.grads.copy_(self._spare, non_blocking=True)
            self._spare = None
        else:
            if self._spare is None:
                self._spare = self._pinned(torch.zeros_like(fresh))
            self.grads.copy_(self._pinned(fresh), non_blocking=True)
        self.grad_key = pointers

    def keep_for_current_stream(self) -> None:
        """Tell the allocator that this stream reads the tables, which were made on another, if so."""
        if self._stream is None or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if stream != self._stream:
            for tensor in (self.table, self.grads, self.scalars, *(part.chunk_tensor for part in self.parts)):
                tensor.record_stream(stream)
            self._stream = stream

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _upload(self, tensor: Tensor) -> Tensor:
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _part(self, kind: Kind, members: list[int], rows: list[list[int]], cut: Chunking) -> Part:
        """Cut the members into chunks; writes each one's first chunk into its row."""
        if kind.tails:
            return Part(kind, self._upload(torch.tensor(members, dtype=torch.int32, device="cpu")), 1)
        counts: list[int] = []
        for i in members:
            rows[i][FIRST_CHUNK] = sum(counts)
            tiles = rows[i][NUMEL] // cut.tile if kind.quantized else -(-rows[i][NUMEL] // cut.tile)
            counts.append(-(-tiles // cut.tiles))
        places = torch.tensor(members, dtype=torch.int32, device="cpu")
        chunk_tensor = places.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        return Part(kind, self._upload(chunk_tensor), cut.tiles)


def _moment_pointers(state: State) -> list[int]:
    """(codes or values, scales) of the three moments; 0 for what a state does not have."""
    return [
        state[name].data_ptr() if name in state else 0 for moment in MOMENTS for name in (moment, moment + "_scale")
    ]
