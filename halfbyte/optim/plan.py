"""What stays the same from one step of a param group to the next.

A step over 448 small parameters takes a GPU 0.3 ms, so the host may not spend a microsecond on each. The lists below
are made once and used again while the parameters are the same objects; what may change in between (gradients, and
where tensors lie) is looked at in every step.
"""

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from halfbyte.optim.rounding import Counter


@dataclass
class Plan:
    """Lists over the parameters of a group that have a gradient.

    params    the parameters.
    states    their states, by reference.
    counters  names of their random numbers, or None when rounding to nearest.
    sharded   whether a parameter or gradient is a DTensor, whose local tensors are then taken in every step.
    options   the group's options that the lists depend on.
    """

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    counters: list[Counter] | None
    sharded: bool
    options: tuple

    @staticmethod
    def options_of(group: dict[str, Any]) -> tuple:
        names = ("bf16_stochastic_round", "seed", "amsgrad", "block_size", "min_quant_numel", "offload_states")
        return tuple(group[name] for name in names)

    def fits(self, params: list[Tensor], group: dict[str, Any]) -> bool:
        """Whether the plan was made for these parameters and options."""
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and self.options == self.options_of(group)
        )
