"""LoRA on a packed base under FSDP2, compared with one process that accumulates the same micro-batches.

They must agree as under DDP: gradients are reduce-scattered instead of all-reduced, and AdamW works element by element.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel.fsdp2 import compare_shards, fsdp2, shard_new_adapter
from halfbyte.parallel.mesh import data_mesh
from tests.dist import run
from tests.parallel.models import PROJECTIONS, batch, loss_of, tiny_base, tiny_lora
from tests.parallel.test_agree import text_of_error
from tests.parallel.training import STEPS, Case, error, forward_backward, make, one_process

MODES = ["plain", "dynamic", "merge-aware", "merge-aware dynamic"]
CASES = {
    **{mode: Case(mode=mode) for mode in MODES},
    "meta, adapters seeded differently": Case(on_meta=True, differently_seeded=True),
    "checkpointing, not reentrant": Case(checkpointing=False),
    "merge-aware, checkpointing": Case(mode="merge-aware", checkpointing=False),
    "dropout": Case(dropout=0.3),
}


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, whole, by name."""
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def this_rank(case: Case, **options: object) -> dict[str, Tensor]:
    rank, model = dist.get_rank(), make(case, dist.get_rank())
    replicate = options.pop("replicate", 1)
    fsdp2(model, data_mesh("cpu", replicate=replicate), **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        forward_backward(case, model, step, rank, 1.0)
        if options.get("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return gathered(model)


def compare(case: Case, options: dict) -> tuple[float, dict[str, tuple[int, ...]]]:
    """Error of the adapter, and local shapes of the base's components."""
    found = this_rank(case, **options)
    return error(found, one_process(case, dist.get_world_size()).adapter), {}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str) -> None:
    for adapter, _ in run(2, compare, CASES[name], {}):
        assert adapter < 1e-5


@pytest.mark.parametrize(
    "options",
    [{"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}],
    ids=["no reshard", "offload"],
)
def test_options(options: dict) -> None:
    for adapter, _ in run(2, compare, Case(), options):
        assert adapter < 1e-5


@pytest.mark.parametrize("replicate", [1, 2])
def test_four_ranks_and_hsdp(replicate: int) -> None:
    for adapter, _ in run(4, compare, Case(on_meta=True), {"replicate": replicate}):
        assert adapter < 1e-5
