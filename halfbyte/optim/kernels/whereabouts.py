"""Where the tensors of a call lie, and whether one of them moved since: a fast path's tables hold addresses.

Looking costs the host 35 ns a tensor, three times that when a backward pass has just filled the caches with other
things, and a parameter comes with five tensors of state. So what need not be looked at is not:

parameters   anybody may move them (`model.to`, `param.data = ...`): their addresses are read in every step, but once.
             `step` has them already and hands the list on; the same list object as last time means the same addresses.
gradients    new in every step of a loop that frees them; the tables keep them apart (table_triton.py).
states       move by nothing but a hand on the dict or a tensor in it. As long as the optimizer has let nobody have
             them (`AdamW.state`), they lie where they lay; from then on they are read in every step, too.

Rejected: to look at some of the states in turn (an update in between would go to memory that is no longer the state),
and to keep the old memory alive instead (safe, and as wrong).
"""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from halfbyte.optim.rounding import Counter

State = dict[str, Tensor]


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def state_addresses(states: Sequence[State]) -> list[int]:
    """Of all tensors of all states, in their order."""
    return list(map(Tensor.data_ptr, chain.from_iterable(map(dict.values, states))))  # type: ignore[arg-type]


class Whereabouts:
    """Addresses of one call's parameters and states, their sizes, and the names of their random numbers."""

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        counters: Sequence[Counter] | None,
        param_addresses: list[int] | None,
        states_stay: bool,
    ) -> None:
        """Arguments as in `hold`. States that do not stay, copies of a moment, are not kept alive either."""
        self.params = addresses(params) if param_addresses is None else param_addresses
        self.numels = list(map(Tensor.numel, params))
        self.states, self.state_addresses = states if states_stay else None, state_addresses(states)
        self.counters = counters and list(counters)

    def hold(
        self,
        params: Sequence[Tensor],
        states: Sequence[State],
        counters: Sequence[Counter] | None,
        param_addresses: list[int] | None,
        states_stay: bool,
    ) -> bool:
        """Whether a later call's tensors are these, where they were.

        param_addresses  those of `params`, where the caller has read them.
        states_stay      if `states` is the same list as then, its dicts and tensors are what and where they were.
        """
        now = addresses(params) if param_addresses is None else param_addresses
        return (
            (now is self.params or now == self.params)
            and list(map(Tensor.numel, params)) == self.numels
            and ((states_stay and states is self.states) or state_addresses(states) == self.state_addresses)
            and (counters and list(counters)) == self.counters
        )
