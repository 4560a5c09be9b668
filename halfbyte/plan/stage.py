"""The tape: a training step as stages, and the most memory it needs at once.

A forward pass is a list of stages. What a stage keeps stays until its own backward is done; backward visits the stages
from the last to the first, and leaves gradients of parameters behind. So at stage i

    forward    kept_0 + ... + kept_i + forward_i
    backward   kept_0 + ... + kept_i + backward_i + grads_i + grads_(i+1) + ... + grads_last

and the peak is the largest of these. One formula for the sum of everything was the alternative; it cannot tell whether
the loss or a layer's backward is the peak, and which of the two it is changes with the vocabulary and the checkpoints.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Stage:
    """One piece of a forward pass; all in bytes.

    kept      from this stage on until its own backward is done: what backward reads.
    forward   on top, while it runs forward: temporaries, and a result that nobody keeps.
    backward  on top, while it runs backward: gradients of activations, temporaries.
    grads     gradients of parameters that its backward leaves.
    """

    name: str
    kept: float = 0
    forward: float = 0
    backward: float = 0
    grads: float = 0


@dataclass(frozen=True)
class Peak:
    """The most bytes at once, and where: the stage's name and "forward" or "backward"."""

    size_bytes: float
    stage: str
    phase: str


def forward_peak(stages: Sequence[Stage]) -> Peak:
    """The peak of a forward pass that keeps."""
    kept = accumulate(stage.kept for stage in stages)
    found = [Peak(size + stage.forward, stage.name, "forward") for size, stage in zip(kept, stages, strict=True)]
    return max(found, key=lambda each: each.size_bytes, default=Peak(0, "", "forward"))


def backward_peak(stages: Sequence[Stage]) -> Peak:
    """The peak of the backward pass that follows."""
    kept = accumulate(stage.kept for stage in stages)
    grads = list(accumulate(stage.grads for stage in reversed(stages)))[::-1]
    found = [
        Peak(size + stage.backward + left, stage.name, "backward")
        for size, left, stage in zip(kept, grads, stages, strict=True)
    ]
    return max(found, key=lambda each: each.size_bytes, default=Peak(0, "", "backward"))


def peak(stages: Sequence[Stage]) -> Peak:
    """The peak of both."""
    return max(forward_peak(stages), backward_peak(stages), key=lambda each: each.size_bytes)


def checkpointed(name: str, stages: Sequence[Stage], input_bytes: float, waiting: float) -> Stage:
    """The same stages under gradient checkpointing, as one stage.

    waiting  gradients that wait while the stages run again: the output's, and what backward made of it before it asked.

    Kept is the input alone. Forward keeps nothing, so at most two neighbours' results are there at once. Backward first
    runs the stages again, this time keeping, and then backward through them. Gradients of parameters are named apart,
    so that later stages see them.
    """
    before = (0, *(stage.kept for stage in stages))
    forward = max((a + stage.kept + stage.forward for a, stage in zip(before, stages, strict=False)), default=0)
    grads = total_grads(stages)
    again = forward_peak(stages).size_bytes + waiting
    backward = backward_peak(stages).size_bytes
    return Stage(name, input_bytes, forward, max(0, again - grads, backward - grads), grads)


def total_kept(stages: Iterable[Stage]) -> float:
    return sum(stage.kept for stage in stages)


def total_grads(stages: Iterable[Stage]) -> float:
    return sum(stage.grads for stage in stages)
