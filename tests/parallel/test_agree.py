"""Success or failure of all ranks together: same error everywhere, in time, with the rank's name."""

import os
import time

import torch.distributed as dist

from halfbyte.parallel import agree, together
from tests.dist import _free_port, outcomes, run


def text_of_error(fn, *args, **kwargs) -> tuple[str, str]:
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def exchange_ranks() -> list:
    return [agree("counting", {"rank": dist.get_rank(), "round": n}) for n in range(3)]


def fail_on_rank(rank: int, kind: type[Exception]) -> tuple[str, str]:
    def block() -> None:
        with together("loading"):
            if dist.get_rank() == rank:
                raise kind("no such thing")

    return text_of_error(block)


def other_place() -> tuple[str, str]:
    return text_of_error(agree, "saving" if dist.get_rank() else "loading")


def late_on_rank_one() -> tuple[str, str]:
    if dist.get_rank() == 1:
        time.sleep(1.5)
    return text_of_error(agree, "loading", timeout=0.5 if dist.get_rank() == 0 else 5)


def dies_before() -> tuple[str, str]:
    if dist.get_rank() == 1:
        os._exit(3)
    return text_of_error(agree, "loading", timeout=1.0)


def the_stores_host_dies_before(port: int) -> tuple[str, str]:
    """As a launch does it, and unlike these tests' group: rank 0 serves the store to all."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        store.wait(["joined"])
        os._exit(3)
    store.set("joined", "")
    return text_of_error(agree, "loading", timeout=5.0)


def in_subgroups() -> list:
    """Ranks 0, 1 and ranks 2, 3 each agree on their own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return agree("half", dist.get_rank(), group=groups[dist.get_rank() // 2])


def keys_left() -> int:
    for _ in range(20):
        agree("again")
    store = dist.group.WORLD.get_group_store()
    return sum(store.check([f"halfbyte/{n}/{rank}"]) for n in range(1, 100) for rank in range(2))


def test_every_rank_reads_every_payload() -> None:
    expected = [[{"rank": rank, "round": n} for rank in range(4)] for n in range(3)]
    assert run(4, exchange_ranks) == [expected] * 4


def test_error_of_one_rank_is_the_error_of_all() -> None:
    zero, one = run(2, fail_on_rank, 1, ValueError)
    assert zero == one
    assert zero[0] == "ValueError"
    assert "loading failed on 1 of 2 ranks" in zero[1] and "rank 1: ValueError: no such thing" in zero[1]


def test_a_fault_of_the_machine_is_a_runtime_error() -> None:
    assert {kind for kind, _ in run(2, fail_on_rank, 0, OSError)} == {"RuntimeError"}


def test_ranks_at_different_places() -> None:
    zero, one = run(2, other_place)
    assert zero == one and "different places of the program: {0: 'loading', 1: 'saving'}" in zero[1]


def test_a_late_rank_is_named() -> None:
    zero, _ = run(2, late_on_rank_one)
    assert zero[0] == "RuntimeError" and "nothing came from rank 1" in zero[1]


def failed_beside_a_late_rank() -> tuple[str, str]:
    if dist.get_rank() == 1:
        time.sleep(1.5)
        return text_of_error(agree, "saving")
    return text_of_error(agree, "saving", error=OSError("disk full"), timeout=0.5)


def test_a_failed_rank_that_waits_in_vain_tells_its_own_error_too() -> None:
    """As when the others wait for it in a collective of an engine."""
    zero, _ = run(2, failed_beside_a_late_rank)
    assert "nothing came from rank 1" in zero[1] and "failed itself: OSError: disk full" in zero[1]


def test_a_dead_rank_is_named() -> None:
    zero, one = outcomes(2, dies_before)
    assert one.exitcode == 3
    assert "s, and nothing came from rank 1. That process" in zero.value[1]
    assert zero.seconds < 10


def test_the_dead_host_of_the_store_is_named_and_no_one_else() -> None:
    zero, one = outcomes(2, the_stores_host_dies_before, _free_port())
    assert zero.exitcode == 3 and one.value[0] == "RuntimeError", one
    assert "the key-value store no longer answers: rank 0 of the job" in one.value[1]
    assert "nothing came from" not in one.value[1]
    assert one.seconds < 20


def test_subgroups_agree_on_their_own() -> None:
    assert run(4, in_subgroups) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_old_messages_are_removed() -> None:
    assert all(left <= 4 for left in run(2, keys_left))


def test_without_a_process_group() -> None:
    assert agree("alone", 5) == [5]
    assert text_of_error(agree, "alone", error=OSError("disk")) == ("OSError", "disk")
