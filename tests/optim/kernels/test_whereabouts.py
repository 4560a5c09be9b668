"""Tables of addresses: made anew when a tensor moved, and only then; and never wrong, whoever moved what, when.

A moved state keeps its values, so an optimizer whose tensors wander must give, bit for bit, what its twin gives whose
tensors stay. If a table were stale, the update would go to the old memory and the twins would part in the next step.
"""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from halfbyte.optim import AdamW4bit, AdamW8bit, offload
from halfbyte.optim.convert import to_torch
from halfbyte.optim.gradient_release import GradientRelease
from halfbyte.optim.kernels.whereabouts import Whereabouts

pytest.importorskip("numba")

SHAPES = [(64, 128), (5000,), (17,)]


def params_of() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_grads(params: list[nn.Parameter], seed: int) -> None:
    """Fresh gradients, as zero_grad() and backward make them."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def replaced_entry(optimizer: AdamW8bit) -> None:
    """The usual loop over `state` after moving a model."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def moved_data(optimizer: AdamW8bit) -> None:
    """As DeepSpeed does to bring states back from the CPU."""
    for state in optimizer.state.values():
        state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()


def new_dicts(optimizer: AdamW8bit) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = {name: value.clone() for name, value in optimizer.state[param].items()}


def new_mapping(optimizer: AdamW8bit) -> None:
    optimizer.state = type(optimizer.state)(dict, {p: dict(s) for p, s in optimizer.state.items()})
    moved_data(optimizer)


def moved_param(optimizer: AdamW8bit) -> None:
    for param in optimizer.param_groups[0]["params"]:
        param.data = param.data.clone()


def one_scale(optimizer: AdamW8bit) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    state["exp_avg_scale"].set_(state["exp_avg_scale"].clone())


def loaded(optimizer: AdamW8bit) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


MOVES = [replaced_entry, moved_data, new_dicts, new_mapping, moved_param, one_scale, loaded]


def twins(cls: type = AdamW8bit) -> Iterator[tuple[list[nn.Parameter], AdamW8bit]]:
    for _ in range(2):
        params = params_of()
        yield params, cls(params, lr=1e-2)


def assert_twins(pairs: list) -> None:
    for one, two in zip(*(params for params, _ in pairs), strict=True):
        assert torch.equal(one, two)
        states = [optimizer.state_dict()["state"] for _, optimizer in pairs]
    for key, state in states[0].items():
        assert all(torch.equal(value, states[1][key][name]) for name, value in state.items())


@pytest.mark.parametrize("move", MOVES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("cls", [AdamW8bit, AdamW4bit])
def test_whoever_moves_a_tensor_between_steps(cls: type, move: Callable) -> None:
    pairs = list(twins(cls))
    for step in range(4):
        for params, optimizer in pairs:
            give_grads(params, step)
            optimizer.step()
        move(pairs[0][1])
        gc.collect()
    assert_twins(pairs)


def emptied(optimizer: AdamW8bit) -> None:
    optimizer.state.clear()


def emptied_inside(optimizer: AdamW8bit) -> None:
    for state in optimizer.state.values():
        state.clear()


def another_mapping(optimizer: AdamW8bit) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("forget", [emptied, emptied_inside, another_mapping], ids=lambda f: f.__name__)
def test_states_taken_away_start_anew(forget: Callable, seen: bool, release: bool) -> None:
    """As with torch's optimizers; also where this is the first that anybody does to `state`."""
    params, optimizer = next(twins())
    if seen:
        assert not optimizer.state

    def step(seed: int, params: list[nn.Parameter], optimizer: AdamW8bit) -> None:
        give_grads(params, seed)
        if not release:
            optimizer.step()
        for place, param in enumerate(params if release else []):
            optimizer.step_parameter(param, 0, place)

    for seed in range(2):
        step(seed, params, optimizer)
    fresh = [nn.Parameter(param.detach().clone()) for param in params]
    forget(optimizer)
    pairs = [(params, optimizer), (fresh, AdamW8bit(fresh, lr=1e-2))]
    for pair in pairs:
        step(2, *pair)
    assert_twins(pairs)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_a_reference_that_was_kept() -> None:
    """Read once, before the steps; used to move a state many steps later."""
    pairs = list(twins())
    for params, optimizer in pairs:
        give_grads(params, 9)
        optimizer.step()
    kept = next(iter(pairs[0][1].state.values()))
    for step in range(6):
        for params, optimizer in pairs:
            give_grads(params, step)
            optimizer.step()
        if step == 3:
            kept["exp_avg"].data = kept["exp_avg"].data.clone()
    assert_twins(pairs)


def test_what_was_handed_out_as_a_state_dict_moves_nothing() -> None:
    """Its tensors are objects of their own, those that share memory with the state too."""
    pairs = list(twins())
    for step in range(4):
        for params, optimizer in pairs:
            give_grads(params, step)
            optimizer.step()
        for saved in (pairs[0][1].state_dict(), to_torch(pairs[0][1])):
            for state in saved["state"].values():
                for value in state.values():
                    value.data = torch.full_like(value, 3)
    assert_twins(pairs)


def plan_of(optimizer: AdamW8bit) -> object:
    (kernels,) = (cache["kernels"] for cache in optimizer._caches)
    (bucket,) = (value for value in kernels.values() if isinstance(value, dict))
    return bucket["plan"]


def test_the_table_is_made_once() -> None:
    """Not for fresh gradients, a new lr, or a checkpoint; but once for a parameter that moved."""
    params = params_of()
    optimizer = AdamW8bit(params)
    give_grads(params, 0)
    optimizer.step()
    plan = plan_of(optimizer)
    kept = []
    for step in range(3):
        kept.append([param.grad for param in params])  # so that the next ones lie elsewhere
        give_grads(params, step)
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        optimizer.state_dict()
    assert plan_of(optimizer) is plan
    params[0].data = params[0].data.clone()
    optimizer.step()
    moved = plan_of(optimizer)
    assert moved is not plan
    optimizer.step()
    assert plan_of(optimizer) is moved


def test_states_are_looked_at_only_once_somebody_had_them(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    hold = Whereabouts.hold

    def noted(self: Whereabouts, *args: object) -> bool:
        looks.append(not args[-1])
        return hold(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Whereabouts, "hold", noted)
    params = params_of()
    optimizer = AdamW8bit(params)
    for step in range(3):
        give_grads(params, step)
        optimizer.step()
        optimizer.state_dict()
    assert looks == [False, False]
    assert optimizer.state[params[0]]["step"] == 3
    optimizer.step()
    assert looks == [False, False, True]
    optimizer.load_state_dict(optimizer.state_dict())  # new states, which nobody had
    for _ in range(2):
        optimizer.step()
    assert looks == [False, False, True, False]


def test_the_same_address_with_another_size() -> None:
    """A parameter cut short in place lies where it lay; its state does not fit any more, and says so."""
    params = [nn.Parameter(torch.randn(8192))]
    optimizer = AdamW8bit(params)
    params[0].grad = torch.ones(8192)
    optimizer.step()
    params[0].grad = None
    params[0].data = params[0].data[:4096]
    params[0].grad = torch.ones(4096)
    with pytest.raises(RuntimeError, match="expected"):
        optimizer.step()


def test_hold_compares_everything() -> None:
    """Each list on its own, so that no table outlives what it describes."""
    params: list[Tensor] = [torch.zeros(4), torch.zeros(4)]
    states = [{"step": torch.zeros(())} for _ in params]
    whereabouts = Whereabouts(params, states, None, None, True)
    assert whereabouts.hold(params, states, None, None, False)
    assert whereabouts.hold(params, states, None, list(whereabouts.params), True)
    assert not whereabouts.hold(params[:1], states[:1], None, None, False)
    assert not whereabouts.hold(params[::-1], states, None, None, False)
    states[1]["step"] = torch.zeros(())
    assert whereabouts.hold(params, states, None, None, True)  # the caller vouched
    assert not whereabouts.hold(params, list(states), None, None, True)  # for another list
    assert not whereabouts.hold(params, states, None, None, False)


def test_copies_of_states_are_not_kept_alive() -> None:
    """Offloaded moments come to the device for one step; tables that kept them would hold the whole model's there."""
    params: list[Tensor] = [torch.zeros(4)]
    states = [{"step": torch.zeros(())}]
    copy = weakref.ref(states[0]["step"])
    whereabouts = Whereabouts(params, states, None, None, False)
    del states
    assert copy() is None
    assert not whereabouts.hold(params, [{"step": torch.zeros(())}, {}], None, None, False)


@pytest.mark.parametrize("release", [False, True])
def test_offloaded_moments_leave_the_device(monkeypatch: pytest.MonkeyPatch, release: bool) -> None:
    """Every copy that a step makes is gone when it returns."""
    copies = []

    def remembered(value: Tensor, device: torch.device) -> Tensor:
        made = value.clone()
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(offload, "_device_copy", remembered)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = AdamW8bit(model.parameters(), offload_states=True)
    if release:
        GradientRelease(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        gc.collect()
        assert len(copies) > 0
        assert all(copy() is None for copy in copies)
