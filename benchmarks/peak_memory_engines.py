"""Memory of one rank under DDP, FSDP2 and tensor parallelism, planned and measured.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.peak_memory_engines            # gloo, small shapes
    torchrun --nproc-per-node 2 -m benchmarks.peak_memory_engines --cuda                       # 8 layers of Llama 8B

Counted as benchmarks/peak_memory.py does. On a CPU DDP's buckets are added: they are there before the step that is
watched; and after each message the step waits until gloo's thread has let go of the tensors. That thread lets go a
little after the message has arrived; where it is the last to hold a tensor, the release falls outside of what the
profiler records, and the count stays too high from there on. A step must end with nothing left, else no figure is
given. FSDP2 on torch before 2.13 is bridged as in benchmarks/fsdp2.py.
"""

import argparse
import gc
import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ddp import header, say
from benchmarks.fsdp2 import bridge
from benchmarks.peak_memory import EIGHT, GPU, OWN, SMALL, Case, allocations, build, config_of
from halfbyte.parallel import ddp
from halfbyte.parallel.fsdp2 import shard_model
from halfbyte.parallel.tensor_parallel import tensor_parallel
from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import Memory, plan_memory
from halfbyte.plan.read import read_shape

SMALL_CASE = Case("512 wide", replace(OWN, micro_batch_size=1, sequence_len=128), config={
    **SMALL, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6
})  # fmt: skip
GPU_CASE = Case("8 layers of Llama-3.1-8B", GPU, config=EIGHT)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuda", action="store_true", help="NCCL, one GPU a rank")
    cuda = parser.parse_args().cuda
    warnings.filterwarnings("ignore")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    bridge()
    unit = 1e9 if cuda else 1e6
    say(header(device).replace("Data parallel", "Memory of a rank, planned and measured"))
    name = "GB" if cuda else "MB"
    say(f"| engine | ckpt | at rest, {name} | planned | peak | planned | error |\n|---|---|---|---|---|---|---|")
    for case, engine in runs(GPU_CASE if cuda else SMALL_CASE, dist.get_world_size()):
        rest, most = measure(case, engine, cuda)
        memory = planned(case, engine)
        figures = " | ".join(f"{size / unit:.2f}" for size in (rest, memory.at_rest, most, memory.peak))
        say(f"| {engine.name} | {checkpoints(case)} | {figures} | {memory.peak / most - 1:+.1%} |")
        gc.collect()
    dist.destroy_process_group()


def runs(case: Case, ranks: int) -> list[tuple[Case, Engine]]:
    """The case under each engine, without and with checkpointing."""
    cases = [replace(case, settings=replace(case.settings, gradient_checkpointing=on)) for on in (False, True)]
    engines = (Engine("ddp", ranks), Engine("fsdp2", ranks), Engine("one", 1, ranks))
    return [(each, engine) for engine in engines for each in cases]


def checkpoints(case: Case) -> str:
    return "on" if case.settings.gradient_checkpointing else "off"


def planned(case: Case, engine: Engine) -> Memory:
    """The plan of a case; on a CPU without the process, since tensors alone are measured."""
    memory = plan_memory(read_shape(config_of(case), Path("case"), case.settings), case.settings, engine)
    process = memory.libraries if case.settings.device == "cpu" else 0
    return replace(memory, peak=memory.peak - process)


def measure(case: Case, engine: Engine, cuda: bool) -> tuple[float, float]:
    """(bytes of weights and states of this rank, bytes at the worst moment of a step)."""
    model = wrapped(case, engine, cuda)
    s = case.settings
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=cuda)
    tokens = torch.randint(0, case.config["vocab_size"], (s.micro_batch_size, s.sequence_len))
    tokens = tokens.to("cuda" if cuda else "cpu")

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    rest = sum(size(p) for p in model.parameters())
    rest += sum(size(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return rest, torch.cuda.max_memory_allocated()
    buckets = sum(size(p) for p in model.parameters() if p.requires_grad) if engine.kind == "ddp" else 0

    def waiting_step() -> None:
        with WaitForGloo():
            step()

    most, left = allocations(waiting_step)
    if left:
        raise RuntimeError(f"{left} bytes of the step have no recorded release. Run it again with less beside it.")
    return rest, most + rest + buckets


class WaitForGloo(TorchDispatchMode):
    """Waits after each message until it has arrived and gloo's thread has let go of its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            work = result[-1] if isinstance(result, (tuple, list)) else result
            dist.Work.unbox(work).wait()
            time.sleep(0.005)
        return result


def wrapped(case: Case, engine: Engine, cuda: bool) -> Any:
    model = build(case)
    if engine.kind == "ddp":
        return ddp(model)
    if engine.kind == "fsdp2":
        return shard_model(model)
    return tensor_parallel(model, init_device_mesh("cuda" if cuda else "cpu", (engine.tensor,)))


def size(tensor: Any) -> int:
    """Bytes of a tensor, or of the shard that this rank holds."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


if __name__ == "__main__":
    main()
