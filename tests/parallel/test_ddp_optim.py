"""Low-bit optimizers under DDP: every rank steps on the same averaged gradient, so states and weights are equal bits.

Also with other torch seeds on each rank: stochastic rounding draws from the optimizer's seed, not from torch's.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import halfbyte.optim
from halfbyte.parallel import ddp
from halfbyte.parallel.digests import tensor_digest
from tests.dist import run
from tests.parallel.models import batch, loss_of, tiny_lora, trainable
from tests.parallel.training import error

STEPS = 20


def states_after(name: str, dtype: torch.dtype, stochastic: bool) -> tuple[list[int], bool, bool]:
    """Digests of all parameters and states; whether states are quantized; whether torch's RNG was left alone."""
    rank = dist.get_rank()
    wrapped = ddp(tiny_lora(dtype=dtype))
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = getattr(halfbyte.optim, name)(parameters, lr=1e-2, min_quant_numel=0, bf16_stochastic_round=stochastic)
    for step in range(STEPS):
        loss_of(wrapped, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [value for p in parameters for value in tensors_in(optimizer.state[p])]
    quantized = any(value.dtype != dtype and value.element_size() == 1 for value in states)
    return [tensor_digest(t) for t in [*parameters, *states]], quantized, torch.equal(before, torch.get_rng_state())


def tensors_in(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_in(value)]
    return []


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize(("dtype", "stochastic"), [(torch.float32, False), (torch.bfloat16, True)])
def test_states_are_equal_on_all_ranks(name: str, dtype: torch.dtype, stochastic: bool) -> None:
    zero, one = run(2, states_after, name, dtype, stochastic)
    assert zero[0] == one[0]
    assert zero[1]
    assert zero[2] and one[2]


def against_one_process(name: str) -> float:
    """Error of the adapter after five steps against one process that accumulates both ranks' batches."""
    make = getattr(halfbyte.optim, name)
    rank, model, reference = dist.get_rank(), tiny_lora(), tiny_lora()
    wrapped = ddp(model)
    optimizers = [make([p for p in m.parameters() if p.requires_grad], lr=1e-3) for m in (wrapped, reference)]
    for step in range(5):
        loss_of(wrapped, batch(step, rank)).backward()
        for part in range(2):
            (loss_of(reference, batch(step, part)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return error(trainable(wrapped), trainable(reference))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_unquantized_small_states_equal_one_process(name: str) -> None:
    """The tiny adapter lies below min_quant_numel, so states are fp32 and the comparison of test_ddp.py holds."""
    assert max(run(2, against_one_process, name)) < 1e-5
