"""Memory of one rank under DDP, FSDP2 and tensor parallelism, planned and measured.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.peak_memory_engines            # gloo, small shapes
    torchrun --nproc-per-node 2 -m benchmarks.peak_memory_engines --cuda                       # 8 layers of Llama 8B

Counted as benchmarks/peak_memory.py does. On a CPU DDP's buckets are added: they are there before the step that is
watched. FSDP2 on torch before 2.13 is bridged as in benchmarks/fsdp2.py.
"""

import argparse
import gc
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ddp import header, say
from benchmarks.fsdp2 import bridge
from benchmarks.peak_memory import EIGHT, GPU, OWN, SMALL, Case, allocator_peak, build, config_of
from halfbyte.parallel import ddp
from halfbyte.parallel.fsdp2 import shard_model
from halfbyte.parallel.tensor_parallel import tensor_parallel
from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import plan_memory
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
    ranks, unit = dist.get_world_size(), 1e9 if cuda else 1e6
    say(header(device).replace("Data parallel", "Memory of a rank, planned and measured"))
    name = "GB" if cuda else "MB"
    say(f"| engine | ckpt | at rest, {name} | planned | peak | planned | error |\n|---|---|---|---|---|---|---|")
    for engine in (Engine("ddp", ranks), Engine("fsdp2", ranks), Engine("one", 1, ranks)):
        for checkpointing in (False, True):
            case = GPU_CASE if cuda else SMALL_CASE
            case = replace(case, settings=replace(case.settings, gradient_checkpointing=checkpointing))
            rest, most = measure(case, engine, cuda)
            memory = plan_memory(read_shape(config_of(case), Path("case"), case.settings), case.settings, engine)
            planned = memory.peak if cuda else memory.peak - memory.libraries
            figures = " | ".join(f"{size / unit:.2f}" for size in (rest, memory.at_rest, most, planned))
            say(f"| {engine.name} | {'on' if checkpointing else 'off'} | {figures} | {planned / most - 1:+.1%} |")
            gc.collect()
    dist.destroy_process_group()


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
    return rest, allocator_peak(step) + rest + buckets


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
