"""LoRA on a packed base under DDP, compared with one process that accumulates the same micro-batches.

They must agree because DDP averages over ranks what one process averages over micro-batches; only the order of a few
fp32 additions differs, so 1e-5 relative holds over five AdamW steps with room (about 1e-6 is seen).
"""

import pytest
import torch
import torch.distributed as dist

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel import ddp
from halfbyte.parallel.synchronize import leave_components_to_us
from tests.dist import run
from tests.parallel.models import batch, loss_of, tiny_lora, trainable
from tests.parallel.training import Case, error, one_process, this_rank, worst_gradient

CASES = {
    "default": Case(),
    "plain DistributedDataParallel": Case(plain=True, differently_seeded=True),
    "accumulation with no_sync": Case(accumulate=2),
    "find_unused_parameters": Case(unused=True, ddp={"find_unused_parameters": True}),
    "static_graph": Case(ddp={"static_graph": True}),
    "gradient_as_bucket_view": Case(accumulate=2, ddp={"gradient_as_bucket_view": True}),
    "checkpointing, not reentrant": Case(checkpointing=False),
    "checkpointing, reentrant": Case(checkpointing=True),
    # Not with no_sync: torch's static_graph fails on any model whose first backward is not synchronized.
    "checkpointing, reentrant, static_graph": Case(checkpointing=True, ddp={"static_graph": True}),
    "uneven last batch, join": Case(short_last=True),
    "dropout, a seed for every rank": Case(dropout=0.3),
    "adapters seeded differently, on meta": Case(differently_seeded=True, on_meta=True),
}


def compare(case: Case) -> tuple[float, float, list[str]]:
    """On each rank: errors of gradients and adapter, and names with gradients."""
    found = this_rank(case)
    expected = one_process(case, dist.get_world_size())
    expected.grads = expected.grads[: len(found.grads)]
    return worst_gradient(found, expected), error(found.adapter, expected.adapter), list(found.grads[0])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str) -> None:
    for gradient, adapter, _ in run(2, compare, CASES[name]):
        assert gradient < 1e-5
        assert adapter < 1e-5


@pytest.mark.parametrize("name", ["default", "accumulation with no_sync", "uneven last batch, join"])
def test_four_ranks_equal_one_process(name: str) -> None:
    for gradient, adapter, _ in run(4, compare, CASES[name]):
        assert gradient < 1e-5
        assert adapter < 1e-5


def test_only_adapters_get_gradients() -> None:
    ((_, _, names), _) = run(2, compare, CASES["default"])
    assert names and all("lora_" in name for name in names)


def test_bf16_is_as_close_as_a_dense_base() -> None:
    """bf16 gradients differ by rounding of the sum; a packed base must not add to what the dense one shows.

    Four ranks, because the sum of two bf16 gradients is rounded alike in both orders.
    """
    (packed, *_), *_ = run(4, compare, Case(dtype=torch.bfloat16))
    (dense, *_), *_ = run(4, compare, Case(dtype=torch.bfloat16, packed=False))
    assert packed <= 2 * dense


def what_ddp_holds() -> tuple[list[str], list[str], bool, bool]:
    """Names reduced; names of buffers that are re-sent; whether rank 1's changed base and buffer were overwritten."""
    wrapped = ddp(tiny_lora())
    reduced = [name for name, p in wrapped.module.named_parameters() if p.requires_grad]
    resent = [name for name, _ in wrapped.module.named_buffers() if name not in wrapped.parameters_to_ignore]
    layer = next(iter(nvfp4_modules(wrapped).values()))
    inv_freq = next(b for n, b in wrapped.named_buffers() if n.endswith("inv_freq"))
    if dist.get_rank() == 1:
        layer.qdata[0, 0] ^= 1
        inv_freq += 1.0
    before, buffer_before = layer.qdata.clone(), inv_freq.clone()
    loss_of(wrapped, batch(0, 0)).backward()
    return reduced, resent, not torch.equal(before, layer.qdata), not torch.equal(buffer_before, inv_freq)


def test_base_is_neither_reduced_nor_sent_again() -> None:
    """A change on rank 1 shows what forward re-sends: buffers, as broadcast_buffers promises, and no component."""
    (reduced, resent, *_), (_, _, base_overwritten, buffer_overwritten) = run(2, what_ddp_holds)
    assert all("lora_" in name for name in reduced)
    assert all("inv_freq" in name for name in resent)
    assert not base_overwritten
    assert buffer_overwritten


def test_ddp_mixed_precision_will_not_cast_the_components() -> None:
    """torch makes a cast copy of every parameter that is not marked; it runs on GPUs only, so the marks are tested."""
    model = tiny_lora()
    leave_components_to_us(model)
    marked = {name for name, p in model.named_parameters() if getattr(p, "_ddp_ignored", False)}
    assert marked == {name for name, p in model.named_parameters() if p.dtype == torch.uint8}


def adapters_after_wrapping() -> dict[str, torch.Tensor]:
    return trainable(ddp(tiny_lora(adapter_seed=dist.get_rank())))


def test_rank_zero_adapter_wins() -> None:
    zero, one = run(2, adapters_after_wrapping)
    assert error(one, zero) == 0
    assert error(zero, trainable(tiny_lora(adapter_seed=0))) == 0


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="Start the script with torchrun"):
        ddp(tiny_lora())
