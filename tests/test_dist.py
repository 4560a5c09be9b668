"""The harness itself: values, errors, deaths, hangs, and fresh workers after each of them."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist import DistError, outcomes, run


def summed(offset: float) -> float:
    x = torch.tensor([offset + dist.get_rank()])
    dist.all_reduce(x)
    return x.item()


def pid_and_environment() -> tuple[int, str, str, int]:
    return os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads()


def fails_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()
    return dist.get_rank()


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def leaves_no_group() -> None:
    dist.destroy_process_group()


def loaded(name: str) -> bool:
    return name in sys.modules


def test_every_rank_answers() -> None:
    assert run(2, summed, 10.0) == [21.0, 21.0]
    assert run(4, summed, 0.0) == [6.0] * 4


def test_workers_are_reused() -> None:
    first, second = run(2, pid_and_environment), run(2, pid_and_environment)
    assert first == second
    assert [entry[1:] for entry in first] == [("0", "2", 1), ("1", "2", 1)]


def test_no_heavy_import_unless_asked() -> None:
    if "transformers" in sys.modules:
        pytest.skip("this session has imported it, so workers have it as well")
    outcomes(2, fails_on, 0, grace=1.0)
    assert run(2, loaded, "transformers") == [False, False]


def test_error_of_a_rank_is_reported_and_workers_replaced() -> None:
    before = run(2, pid_and_environment)
    with pytest.raises(DistError, match="(?s)rank 1 .*fails_on.*ValueError: rank 1 does not like this"):
        run(2, fails_on, 1)
    after = run(2, pid_and_environment)
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after)
    assert run(2, summed, 0.0) == [1.0, 1.0]


def test_death_of_a_rank_is_reported() -> None:
    with pytest.raises(DistError, match="rank 0 .* died with exit code -9"):
        run(2, dies_on, 0)
    assert run(2, summed, 0.0) == [1.0, 1.0]


def test_a_hang_ends_at_the_timeout_and_shows_where() -> None:
    with pytest.raises(DistError, match="(?s)rank 0 .*returned.*rank 1 .*timed out here.*hangs_on"):
        run(2, hangs_on, 1, timeout=1.0)


def test_outcomes_tell_each_rank_apart() -> None:
    good, bad = outcomes(2, hangs_on, 1, timeout=1.0)
    assert good.ok and not bad.ok
    results = outcomes(2, fails_on, 0, grace=5.0)
    assert isinstance(results[0].error, ValueError)


def test_a_destroyed_group_comes_back() -> None:
    pids = run(2, pid_and_environment)
    run(2, leaves_no_group)
    assert run(2, summed, 0.0) == [1.0, 1.0]
    assert run(2, pid_and_environment) == pids
