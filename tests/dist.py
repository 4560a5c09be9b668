"""Run a function on several ranks: real processes, a gloo process group, a time limit.

    from tests.dist import run

    def rank_sum(x):                      # importable (module level); torch.distributed is ready inside
        t = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(t)
        return t.item()

    assert run(2, rank_sum, 10) == [21, 21]

The workers of a world size are forked once, from a server process that has imported torch (and transformers or peft,
if the session has), and serve every later call of the session: a call costs milliseconds. They are thrown away after
any call in which a rank raised, died or ran late, since nobody knows which collectives are then half done; the next
call gets fresh ones. A test that *expects* an error therefore catches it inside its function, or reads `outcomes`,
which raises nothing.

Rejected: `torch.multiprocessing.spawn`, and one torchrun a test: seconds of imports for each of several hundred
tests.
"""

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# How long the other ranks may go on after one has failed. A rank that waits for a dead peer normally sees the
# connection close within milliseconds.
GRACE_S = 10.0


class DistError(AssertionError):
    """At least one rank raised, died or ran late; the message holds what each rank did."""


@dataclass
class Outcome:
    """What one rank did with one call: exactly one of `value`, `error` and `exitcode` tells."""

    value: Any = None
    error: BaseException | None = None
    error_text: str = ""  # the traceback, or where the rank hung
    exitcode: int | None = None  # set when the process died; minus the signal's number
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error_text and self.exitcode is None


def run(world_size: int, fn: Callable, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call fn(*args) on every rank and return their values, rank by rank.

    fn     importable by name; args and values are pickled. Each rank starts with torch.manual_seed(0).
    raises DistError with every rank's traceback when one raises, dies, or has not returned after `timeout` seconds.
    """
    results = outcomes(world_size, fn, *args, timeout=timeout, grace=GRACE_S)
    if not all(result.ok for result in results):
        lines = [f"{fn.__module__}.{fn.__qualname__} on {world_size} ranks:"]
        for rank, result in enumerate(results):
            how = "returned" if result.ok else result.error_text or f"died with exit code {result.exitcode}"
            lines.append(f"--- rank {rank} ({result.seconds:.1f} s): {how}")
        raise DistError("\n".join(lines))
    return [result.value for result in results]


def outcomes(
    world_size: int, fn: Callable, *args: Any, timeout: float = 120.0, grace: float | None = None
) -> list[Outcome]:
    """As `run`, for tests of faults: raises nothing. With grace=None every rank gets the whole timeout."""
    pool = _POOLS.get(world_size)
    if pool is not None and not pool.healthy():
        pool.close()
        pool = None
    if pool is None:
        pool = _POOLS[world_size] = Pool(world_size)
    results = pool.call(fn, args, timeout, grace)
    if not all(result.ok for result in results):
        pool.close()
        del _POOLS[world_size]
    return results


class Pool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int):
        self.folder = tempfile.mkdtemp(prefix="halfbyte-dist-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "pytest", __name__, *_heavy_imports_of_this_process()])
        port = _free_port()
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, rank, world_size, port, self.folder))
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def healthy(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def call(self, fn: Callable, args: tuple, timeout: float, grace: float | None) -> list[Outcome]:
        request = pickle.dumps((fn.__module__, fn.__qualname__, args, sys.path))
        results: dict[int, Outcome] = {}
        start = time.monotonic()
        deadline = start + timeout
        for connection in self.connections:
            connection.send_bytes(request)
        while len(results) < len(self.processes):
            waiting = {self.connections[r]: r for r in range(len(self.processes)) if r not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    results[rank] = Outcome(error_text=self._where(rank), seconds=time.monotonic() - start)
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                results[rank] = self._receive(rank)
                results[rank].seconds = time.monotonic() - start
                if grace is not None and not results[rank].ok:
                    deadline = min(deadline, time.monotonic() + grace)
        return [results[rank] for rank in range(len(self.processes))]

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self.connections[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(5)
            return Outcome(exitcode=self.processes[rank].exitcode)

    def _where(self, rank: int) -> str:
        """Stack of a rank that is late, as faulthandler sees it."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        path = Path(self.folder, f"stack{rank}")
        return "timed out here:\n" + (path.read_text() if path.exists() else "(no stack)")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


_POOLS: dict[int, Pool] = {}  # of this test session, by world size


@atexit.register
def _close_all() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


def _heavy_imports_of_this_process() -> list[str]:
    """What a test file has imported at its top is worth importing once, before the workers are forked."""
    names = ["transformers", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "accelerate"]
    names += ["datasets", "trl", "halfbyte.train.trainer"]
    return [name for name in names if name in sys.modules]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _worker(connection: Any, rank: int, world_size: int, port: int, folder: str) -> None:
    """Serve calls until the test session closes the pipe. The environment is torchrun's."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    stack = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115 - stays open for faulthandler
    faulthandler.register(signal.SIGUSR1, file=stack)
    while True:
        try:
            module, name, args, path = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        sys.path[:] = path
        if not dist.is_initialized():  # first call, or the last one destroyed the group
            _join_group(connection, rank, world_size, folder)
        answer, ok = _outcome(module, name, args)
        connection.send_bytes(answer)
        if not ok:
            os._exit(1)  # as a real rank would: its peers see the connection close


def _join_group(connection: Any, rank: int, world_size: int, folder: str) -> None:
    import torch.distributed as dist

    generation = len(list(Path(folder).glob(f"joined{rank}.*")))
    Path(folder, f"joined{rank}.{generation}").touch()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{generation}", rank=rank, world_size=world_size)


def _outcome(module: str, name: str, args: tuple) -> tuple[bytes, bool]:
    """Pickled Outcome of one call, and whether it went well."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    linear = torch.nn.functional.linear
    try:
        fn = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        answer, ok = pickle.dumps(Outcome(value=fn(*args))), True  # type: ignore[operator]
    except BaseException as error:  # a rank that calls sys.exit has failed as well
        answer, ok = _pickled_error(error, traceback.format_exc()), False
    torch.nn.functional.linear = linear  # DeepSpeed's ZeRO-3 leaves its own there
    torch.set_default_dtype(torch.float32)
    gc.collect()
    return answer, ok


def _pickled_error(error: BaseException, text: str) -> bytes:
    try:
        answer = pickle.dumps(Outcome(error=error, error_text=text))
        pickle.loads(answer)  # some exceptions only fail here
        return answer
    except Exception:
        return pickle.dumps(Outcome(error=RuntimeError(str(error)), error_text=text))
