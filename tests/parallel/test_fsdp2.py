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


def clipped_norms() -> tuple[float, float]:
    """Global gradient norm that clipping sees: sharded, and in one process."""
    case, rank = Case(), dist.get_rank()
    model = fsdp2(make(case, rank), data_mesh("cpu"))
    forward_backward(case, model, 0, rank, 1.0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item()
    reference = make(case)
    for part in range(2):
        forward_backward(case, reference, 0, part, 0.5)
    return norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()


def test_clipping_uses_the_global_norm() -> None:
    for norm, expected in run(2, clipped_norms):
        assert norm == pytest.approx(expected, rel=1e-5)


def mixed_precision() -> tuple[bool, float, set[torch.dtype]]:
    """bf16 compute over fp32 adapters: components intact, gradients fp32, loss near fp32's."""
    model, rank = tiny_lora(), dist.get_rank()
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    expected = loss_of(model, batch(0, rank)).item()
    fsdp2(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    loss = loss_of(model, batch(0, rank))
    loss.backward()
    intact = all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters() if n in before)
    return intact, abs(loss.item() - expected), {p.grad.dtype for p in model.parameters() if p.grad is not None}


def test_mixed_precision_leaves_the_base() -> None:
    for intact, difference, dtypes in run(2, mixed_precision):
        assert intact and difference < 0.05 and dtypes == {torch.float32}


def adapter_after_sharding() -> tuple[dict[str, Tensor], float]:
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
    shard_new_adapter(model, mesh)
    start = gathered(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        forward_backward(Case(), model, step, rank, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return start, error(gathered(model), one_process(Case(), 2).adapter)


def test_adapter_added_after_sharding() -> None:
    (zero, worst), (one, other) = run(2, adapter_after_sharding)
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
    for (_, text), words in zip(zero, ["needs 4 ranks, but 2", "3 dimensions", "blocks=", "rank 1, "], strict=True):
        assert words in text
