"""Ranks that succeed together or fail together: one exchange of a small message, and the same error everywhere.

A rank that raises while the others wait in a collective leaves them hanging until the backend's timeout, which is ten
minutes or more and names nobody. Here every rank posts a message, also when it has failed, and reads everybody's;
whoever does not post within the time limit is named.

The messages go through the process group's key-value store, not through a collective: it works under every backend
(NCCL would want a GPU tensor), has a time limit of its own, and can tell which rank is missing. Rejected:
`all_gather_object` on an extra gloo group, whose error after a death names an address and a port, and which needs
gloo to find the right network interface on NCCL clusters.
"""

import json
import time
from base64 import b85decode, b85encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from zlib import compress, decompress

import torch.distributed as dist

CHECK_TIMEOUT_S = 60.0


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 when nothing distributed has been started."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def agree(
    label: str,
    payload: Any = None,
    *,
    error: Exception | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = CHECK_TIMEOUT_S,
) -> list[Any]:
    """Post this rank's payload, or its error, and return every rank's payload in rank order.

    label    what is being agreed on, for the messages; the same on all ranks.
    payload  anything JSON can hold.
    raises   on every rank the same ValueError (all causes were ValueErrors) or RuntimeError when some rank posted an
             error; RuntimeError naming the ranks that posted nothing within `timeout` seconds.
    """
    if world_size(group) == 1:
        if error is not None:
            raise error
        return [payload]
    cause = None if error is None else [_kind(error), f"{type(error).__name__}: {error}"]
    try:
        messages = _exchange({"label": label, "cause": cause, "payload": payload}, group, timeout)
    except RuntimeError as missing:
        if cause is None:
            raise
        raise RuntimeError(f"{missing} This rank had failed itself: {cause[1]}") from error
    _check_labels(messages)
    failed = {rank: m["cause"] for rank, m in enumerate(messages) if m["cause"] is not None}
    if failed:
        kind = ValueError if all(k == "ValueError" for k, _ in failed.values()) else RuntimeError
        text = "; ".join(f"rank {rank}: {what}" for rank, (_, what) in failed.items())
        raise kind(f"{label} failed on {len(failed)} of {len(messages)} ranks, so all of them stop. {text}") from error
    return [m["payload"] for m in messages]


@contextmanager
def together(label: str, *, group: dist.ProcessGroup | None = None, timeout: float = CHECK_TIMEOUT_S) -> Iterator[None]:
    """Run a block on every rank; when it raises on one, every rank raises, as in `agree`.

    timeout  seconds that a rank which has finished the block waits for the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(label, error=error, group=group, timeout=timeout)


def _kind(error: Exception) -> str:
    return "ValueError" if isinstance(error, ValueError) else "RuntimeError"


def _check_labels(messages: list[dict]) -> None:
    """Ranks that run different programs meet at the same key; say so instead of mixing their messages."""
    places = {rank: m["label"] for rank, m in enumerate(messages)}
    if len(set(places.values())) > 1:
        raise RuntimeError(
            f"The ranks are at different places of the program: {places}. Every rank must make the same calls in the "
            "same order; look for a branch that depends on the rank."
        )


def _exchange(message: dict, group: dist.ProcessGroup | None, timeout: float) -> list[dict]:
    """All-gather of one JSON message through the group's store.

    A key belongs to one round and one rank. Whoever has seen all keys of round n knows that everybody has read round
    n - 1, and removes its own key of that round.
    """
    store = (group or dist.group.WORLD).get_group_store()  # type: ignore[union-attr]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    start = time.monotonic()
    keys: list[str] = []
    try:
        this_round = store.add(f"halfbyte/round/{rank}", 1)
        keys = [_key(this_round, other) for other in range(size)]
        store.set(keys[rank], b85encode(compress(json.dumps(message).encode())).decode())
        store.wait(keys, timedelta(seconds=timeout))
        messages = [json.loads(decompress(b85decode(store.get(key)))) for key in keys]
        if this_round > 1:
            store.delete_key(_key(this_round - 1, rank))
    except RuntimeError as error:
        waited = f"{message['label']}: rank {rank} waited {time.monotonic() - start:.0f} s, and "
        raise RuntimeError(waited + _what_is_missing(store, keys, rank)) from error
    return messages


def _what_is_missing(store: dist.Store, keys: list[str], rank: int) -> str:
    """Which other ranks have posted nothing, or why nobody can tell, and what to do."""
    gone = (
        "the key-value store no longer answers: rank 0 of the job, which holds it (under torchrun, its launcher), has "
        "gone. Read its log first."
    )
    if not keys:  # it did not even count the round
        return gone
    try:
        missing = [f"rank {other}" for other, key in enumerate(keys) if other != rank and not store.check([key])]
    except RuntimeError:
        return gone
    return (
        f"nothing came from {', '.join(missing) or 'another rank until now'}. That process has died, or is still busy "
        "before this point: read its log; if it was only slow, raise the timeout."
    )


def _key(this_round: int, rank: int) -> str:
    return f"halfbyte/{this_round}/{rank}"
