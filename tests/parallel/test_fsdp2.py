"""FSDP2's own options with LoRA on a packed base, compared with one process that accumulates the same micro-batches.

They must agree as under DDP: gradients are reduce-scattered instead of all-reduced, and AdamW works element by element.
test_matrix.py has every mode with every optimizer.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from halfbyte.lora.merge_aware import make_merge_aware
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.optim.sharding import is_dtensor
from halfbyte.parallel.fsdp2 import check_offload, clip_grad_norm, compare_shards, fsdp2, shard_new_adapter
from halfbyte.parallel.mesh import data_mesh
from tests.dist import run
from tests.parallel.models import PROJECTIONS, batch, loss_of, tiny_base, tiny_lora
from tests.parallel.test_agree import text_of_error
from tests.parallel.training import STEPS, Case, error, forward_backward, make, one_process

OFFLOAD = CPUOffloadPolicy(pin_memory=False)
CASES: dict[str, tuple[Case, dict]] = {
    "checkpointing, not reentrant": (Case(checkpointing=False), {}),
    "checkpointing, reentrant": (Case(checkpointing=True), {}),
    "merge-aware, checkpointing": (Case(mode="merge-aware dynamic", checkpointing=False), {}),
    "dropout": (Case(dropout=0.3), {}),
    "no reshard": (Case(), {"reshard_after_forward": False}),
    "merge-aware, no reshard": (Case(mode="merge-aware"), {"reshard_after_forward": False}),
    "offload": (Case(on_meta=True), {"offload_policy": OFFLOAD}),
    "merge-aware, offload": (Case(mode="merge-aware", on_meta=True), {"offload_policy": OFFLOAD}),
}


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters, whole, by name."""
    return {n: p.full_tensor().detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def this_rank(case: Case, **options: object) -> dict[str, Tensor]:
    rank, model = dist.get_rank(), make(case, dist.get_rank())
    fsdp2(model, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        forward_backward(case, model, step, rank, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return gathered(model)


def compare(case: Case, options: dict) -> float:
    """Error of the adapter."""
    return error(this_rank(case, **options), one_process(case, dist.get_world_size()).adapter)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name: str) -> None:
    for adapter in run(2, compare, *CASES[name]):
        assert adapter < 1e-5


def test_four_ranks() -> None:
    """A sum of four has its own order: last bits, and no more."""
    for adapter in run(4, compare, Case(on_meta=True), {}):
        assert adapter < 1e-5


def gathered_blocks(reshard: bool) -> list[int]:
    """How many decoder layers are whole on this rank at the end of each one's forward."""
    model = fsdp2(make(Case(), dist.get_rank()), reshard_after_forward=reshard)
    layers, counts = model.base_model.model.model.layers, []

    def count(*_: object) -> None:
        counts.append(sum(not is_dtensor(layer.mlp.up_proj.base_layer.qdata) for layer in layers))

    for layer in layers:
        layer.mlp.register_forward_hook(count)
    loss_of(model, batch(0, 0)).backward()
    return counts


@pytest.mark.parametrize(("reshard", "expected"), [(True, [1, 1]), (False, [1, 2])])
def test_a_rank_gathers_one_block_at_a_time(reshard: bool, expected: list[int]) -> None:
    for counts in run(2, gathered_blocks, reshard):
        assert counts == expected


def shares_of_the_base() -> tuple[float, bool, bool]:
    """This rank's share of the packed bytes at rest; whether a shifted shard is found; whether bytes survive a step."""
    model = make(Case(on_meta=True), dist.get_rank())
    mesh = data_mesh("cpu")
    full = tiny_lora()
    whole = {n: p.detach() for n, p in full.named_parameters() if p.dtype == torch.uint8}
    fsdp2(model, mesh)
    loss_of(model, batch(0, 0)).backward()
    mine = sum(p.to_local().numel() for p in model.parameters() if p.dtype == torch.uint8)
    unchanged = all(torch.equal(p.full_tensor(), whole[n]) for n, p in model.named_parameters() if n in whole)
    layer = next(iter(nvfp4_modules(model).values()))
    if dist.get_rank() == 1:
        layer.scale.to_local()[0, 0] ^= 1
    zero = {n: t.detach() for n, t in full.named_parameters()} if dist.get_rank() == 0 else None
    return mine / sum(t.numel() for t in whole.values()), text_of_error(compare_shards, model, zero, mesh)[1], unchanged


def test_a_rank_holds_its_share_and_damage_is_found() -> None:
    (share, text, unchanged), (_, other, _) = run(2, shares_of_the_base)
    assert share == pytest.approx(0.5)
    assert text == other and "q_proj.base_layer.scale and 0 more" in text
    assert unchanged


def clipped_norms(replicate: int) -> list[float]:
    """Global norm that clipping sees and leaves: torch's on shards, ours on shards, and in one process."""
    case, rank, ranks = Case(), dist.get_rank(), dist.get_world_size()
    found = []
    for ours in (False, True):
        mesh = data_mesh("cpu", replicate=replicate)
        model = fsdp2(make(case, rank), mesh)
        forward_backward(case, model, 0, rank, 1.0)
        if ours:
            found += [clip_grad_norm(model, limit, mesh).item() for limit in (0.1, 1.0)]
        else:
            norms = [nn.utils.clip_grad_norm_(model.parameters(), limit) for limit in (0.1, 1.0)]
            found += [norm.full_tensor().item() for norm in norms]
    reference = make(case)
    for part in range(ranks):
        forward_backward(case, reference, 0, part, 1 / ranks)
    return [*found, *(nn.utils.clip_grad_norm_(reference.parameters(), limit).item() for limit in (0.1, 1.0))]


@pytest.mark.parametrize(("ranks", "replicate"), [(2, 1), (4, 2)])
def test_clipping_uses_the_global_norm(ranks: int, replicate: int) -> None:
    for found in run(ranks, clipped_norms, replicate):
        assert found[4] > 0.15 and found[5] == pytest.approx(0.1, rel=1e-3)
        assert found == pytest.approx(found[4:] * 3, rel=1e-5)


def adapter_after_sharding(case: Case) -> tuple[dict[str, Tensor], float]:
    """Base sharded first; then every rank draws another adapter (SCENARIOS n12) and trains it."""
    import peft

    rank, mesh = dist.get_rank(), data_mesh("cpu")
    base = fsdp2(tiny_base(), mesh)
    torch.manual_seed(1000 + rank)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    if "merge-aware" in case.mode:
        make_merge_aware(model, cache=False)
    if case.checkpointing is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing})
    shard_new_adapter(model.train(), mesh)
    start = gathered(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        forward_backward(case, model, step, rank, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return start, error(gathered(model), one_process(case, 2).adapter)


@pytest.mark.parametrize("mode", ["plain", "merge-aware"])
@pytest.mark.parametrize("checkpointing", [None, False])
def test_adapter_added_after_sharding(mode: str, checkpointing: bool | None) -> None:
    (zero, worst), (one, other) = run(2, adapter_after_sharding, Case(mode=mode, checkpointing=checkpointing))
    assert error(one, zero) == 0
    assert max(worst, other) < 1e-5


def refusals() -> list[tuple[str, str]]:
    from torch.distributed.device_mesh import init_device_mesh

    one_sided = tiny_lora()
    if dist.get_rank() == 1:
        next(iter(nvfp4_modules(one_sided).values())).dtype = torch.bfloat16
    return [
        text_of_error(data_mesh, "cpu", replicate=2, shard=2),
        text_of_error(fsdp2, tiny_lora(), init_device_mesh("cpu", (1, 1, 2))),
        text_of_error(fsdp2, nn.Linear(2, 2)),
        text_of_error(fsdp2, one_sided),
    ]


def test_refusals() -> None:
    zero, one = run(2, refusals)
    assert zero == one and {kind for kind, _ in zero} == {"ValueError"}
    expected = ["needs 4 ranks, but 2", "3 dimensions", "blocks=", "rank 1, "]
    for (_, text), words in zip(zero, expected, strict=True):
        assert words in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinned memory is right there")
def test_offload_without_an_accelerator_needs_no_pinned_memory() -> None:
    with pytest.raises(ValueError, match="pin_memory=False"):
        check_offload(CPUOffloadPolicy())
