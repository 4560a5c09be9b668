"""The tape against a plain simulation that allocates and frees, one event after the other."""

import random

from halfbyte.plan.stage import Stage, checkpointed, peak


def simulate(stages: list[Stage]) -> float:
    """The most bytes that are there at once, by running forward and backward."""
    live = most = 0.0
    for stage in stages:
        live += stage.kept
        most = max(most, live + stage.forward)
    for stage in reversed(stages):
        live += stage.grads
        most = max(most, live + stage.backward)
        live -= stage.kept
    return most


def random_stages(count: int, seed: int) -> list[Stage]:
    rng = random.Random(seed)
    return [Stage(str(i), *(rng.randrange(1000) for _ in range(4))) for i in range(count)]


def test_peak_is_what_a_simulation_finds() -> None:
    for seed in range(50):
        stages = random_stages(seed % 7 + 1, seed)
        assert peak(stages).size_bytes == simulate(stages)


def test_the_peak_names_its_moment() -> None:
    stages = [Stage("a", kept=5), Stage("b", kept=1, backward=10), Stage("c", forward=3)]
    found = peak(stages)
    assert (found.stage, found.phase, found.size_bytes) == ("b", "backward", 16)
    assert peak([]).size_bytes == 0


def test_checkpointing_keeps_the_input_and_runs_again() -> None:
    """Three blocks of two stages, simulated: forward without keeping, then each block again with keeping."""
    own = [Stage("x", kept=10, forward=2, backward=4, grads=1), Stage("y", kept=20, forward=3, backward=5, grads=1)]
    block = checkpointed("block", own, input_bytes=7, waiting=7)
    inputs, grads = 3 * 7, 0
    worst = 0
    for left in (3, 2, 1):
        again = max(10 + 2, 30 + 3) + 7
        backward = max(30 + 5 + 1, 10 + 4 + 2)
        worst = max(worst, 7 * left + grads + max(again, backward))
        grads += 2
    assert inputs == 21 and peak([block] * 3).size_bytes == worst


def test_equal_blocks_may_be_lumped() -> None:
    """Between the first and the last of a run nothing can be the peak."""
    for seed in range(50):
        own = random_stages(3, seed)
        lump = [Stage("", grads=5 * sum(s.grads for s in own)), Stage("", kept=5 * sum(s.kept for s in own))]
        end = random_stages(2, seed + 1000)
        assert peak([*own, *lump, *own, *end]).size_bytes == peak([*own * 7, *end]).size_bytes
