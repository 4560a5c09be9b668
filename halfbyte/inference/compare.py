"""Several models on the same prompt: which ones, and how their answers are run one after the other.

A base and an adapter on it share one model in memory: the adapter is switched off for the base's turn.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from halfbyte.checkpoint.hub import local_folder
from halfbyte.inference.answer import Emit, Sampling, answer
from halfbyte.inference.load import Runnable, is_adapter, load_runnable

BASE = "base"


@dataclass(frozen=True)
class Voice:
    """A model that answers. adapter: whether the adapter of `runnable` is on, where it has one."""

    name: str
    runnable: Runnable
    adapter: bool = True

    def say(self, tokens_of: Callable[[Runnable], Any], sampling: Sampling, emit: Emit) -> str:
        """Answer what `tokens_of` makes of the prompt for this model's tokenizer."""
        off = self.runnable.with_adapter and not self.adapter
        with self.runnable.model.disable_adapter() if off else nullcontext():
            return answer(self.runnable, tokens_of(self.runnable), sampling, emit)


def voices(
    base: str, adapter: str | None, compare: str | None, *, any_base: bool = False, device: str = "auto"
) -> list[Voice]:
    """The models to answer: the base or base with adapter, and what it is compared with.

    compare  "base" (the adapter switched off), a model's folder (merged, dense, ...), or another adapter of the base.
    raises   as `load_runnable`; ValueError for "base" without an adapter to switch off.
    """
    if compare == BASE and adapter is None:
        raise ValueError(
            "--compare base needs an adapter: without one the base is compared with itself; give one, or another model "
            "to compare with"
        )
    first = load_runnable(base, adapter, any_base=any_base, device=device)
    one = Voice(first.name, first)
    if compare is None:
        return [one]
    if compare == BASE:
        return [Voice(base, first, adapter=False), one]
    other = local_folder(compare)
    second = (
        load_runnable(base, compare, any_base=any_base, device=device)
        if is_adapter(other)
        else load_runnable(compare, device=device)
    )
    return [one, Voice(second.name, second)]
