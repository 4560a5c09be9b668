"""Merge-aware LoRA under DDP: ranks agree on W' by digest, and equal one process that accumulates their micro-batches.

DDP averages over ranks what one process averages over micro-batches, so only the order of a few fp32 additions differs:
factors agree to 1e-5. A factor's last bit can flip a code whose share lies on its threshold; such codes are counted,
not tolerated away: of 4096 codes over five steps at most two. A dynamic activation scale is each micro-batch's own on
both sides.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfbyte.lora import make_merge_aware, merged_digest, merged_weights
from halfbyte.numerics.packing import unpack_nibbles
from halfbyte.nvfp4 import ActivationQuant
from halfbyte.parallel import ddp
from tests.dist import run
from tests.lora.models import nvfp4_mlp, with_lora

STEPS, LR = 5, 1e-2


def micro_batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 32, generator=generator), torch.randn(6, 8, generator=generator)


def build(activation: ActivationQuant | None, cache: bool) -> Any:
    return make_merge_aware(with_lora(nvfp4_mlp(activation)), cache=cache)


def train(model: Any, ranks: list[int]) -> list[str]:
    """Five AdamW steps on these ranks' micro-batches, accumulated; digests of W' after each."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    digests = []
    for step in range(STEPS):
        for rank in ranks:
            x, y = micro_batch(step, rank)
            ((model(x) - y).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(merged_digest(model))
    return digests


def on_a_rank(activation: ActivationQuant | None, cache: bool) -> tuple[list[str], float, int]:
    """(digests, largest relative difference of a factor from one process, codes that differ from its W')."""
    rank, alone = dist.get_rank(), build(activation, cache)
    model = build(activation, cache)
    digests = train(ddp(model), [rank])
    train(alone, list(range(dist.get_world_size())))
    expected = dict(alone.named_parameters())
    errors = [
        ((p - expected[name]).norm() / expected[name].norm()).item()
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    flips = sum(
        int((unpack_nibbles(here.qdata) != unpack_nibbles(there.qdata)).sum())
        for (_, here), (_, there) in zip(merged_weights(model), merged_weights(alone), strict=True)
    )
    return digests, max(errors), flips


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("activation", [None, ActivationQuant()], ids=["weight-only", "dynamic"])
def test_two_ranks(activation: ActivationQuant | None, cache: bool) -> None:
    (first, error, flips), (second, *_) = run(2, on_a_rank, activation, cache)
    assert first == second and len(set(first)) == STEPS
    assert error < 1e-5 and flips <= 2
