"""What DeepSpeed ZeRO does with a packed base: offload, casts, partitions, saving, refusals.

Compared with one process on the same micro-batches: the stages differ in who holds which state, not in what is
computed. test_matrix.py has every stage with every mode and optimizer.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel import zero3
from halfbyte.parallel.deepspeed import check_config, prepare_for_deepspeed, read_deepspeed_config
from halfbyte.parallel.digests import tensor_digest
from halfbyte.parallel.fsdp2 import transformer_blocks
from halfbyte.parallel.gather import gather_trainable, save_adapter
from tests.dist import run
from tests.parallel import zero
from tests.parallel.models import batch, loss_of
from tests.parallel.test_agree import text_of_error
from tests.parallel.training import Case, error, make, one_process

TIMEOUT = 120  # a worker's first call imports deepspeed


pytestmark = pytest.mark.timeout(1200)  # the first test waits for a compiler


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The op that DeepSpeed needs on a CPU, compiled before any rank asks for it."""
    if not zero.OP.exists():
        subprocess.run([sys.executable, "-m", "tests.parallel.build_deepspeed_op"], check=True, timeout=1100)


def compare(case: Case, stage: int, options: dict[str, Any]) -> tuple[float, bool]:
    """Error of the adapter; whether the base's bytes are as they were."""
    model = make(case, dist.get_rank())
    expected = one_process(case, dist.get_world_size()).adapter
    settings = prepare_for_deepspeed(model, zero.config(stage, **options))
    engine = zero.initialize(model, settings)
    zero.take_steps(engine)
    before = {n: p for n, p in make(case).named_parameters() if p.dtype == torch.uint8}
    after = zero.whole_base(engine.module)
    intact = all(torch.equal(after[n], t) for n, t in before.items())
    return error(gather_trainable(engine.module), expected), intact


OFFLOAD = {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"offload_optimizer": OFFLOAD}),
        (2, {"offload_optimizer": OFFLOAD}),
        (3, {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}),
    ],
)
def test_offload(stage: int, options: dict[str, Any]) -> None:
    for adapter, intact in run(2, compare, Case(on_meta=True), stage, options, timeout=TIMEOUT):
        assert adapter < 1e-5 and intact


@pytest.mark.parametrize(
    ("stage", "case"),
    [
        (1, Case(checkpointing=False)),
        (2, Case(checkpointing=False)),
        (3, Case(checkpointing=False)),
        (3, Case(checkpointing=True)),
        (3, Case(checkpointing=False, mode="merge-aware dynamic")),
    ],
    ids=["1", "2", "3", "3, reentrant", "3, merge-aware dynamic"],
)
def test_gradient_checkpointing(stage: int, case: Case) -> None:
    """Recomputed in backward, of which stage 3 gathers the parameters once more."""
    for adapter, intact in run(2, compare, case, stage, {}, timeout=TIMEOUT):
        assert adapter < (1e-5 if case.mode == "plain" else 1e-3) and intact


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_four_ranks(stage: int) -> None:
    for adapter, intact in run(4, compare, Case(on_meta=True, differently_seeded=True), stage, {}, timeout=TIMEOUT):
        assert adapter < 1e-5 and intact


def partitioned_blocks() -> list[tuple[set[str], set[int]]]:
    """After each block: devices of the next block's parameters on this rank, and how many values of this one's it holds
    outside of its parts."""
    model = make(Case(on_meta=True), dist.get_rank())
    holders, blocks = zero3.holders_of(model), transformer_blocks(model)
    settings = zero3.init_config(zero.config(3))
    zero3.start_deepspeed()
    found = []
    for block, following in zip(blocks, [*blocks[1:], model.get_output_embeddings()], strict=True):
        zero3.partition(block, holders, settings)
        found.append(({p.device.type for p in following.parameters()}, {p.numel() for p in block.parameters()}))
    return found


def test_stage_3_loads_a_block_at_a_time() -> None:
    """A rank without weights gets memory for a block when it is that block's turn, and keeps its parts of it alone."""
    zero_, one = run(2, partitioned_blocks, timeout=TIMEOUT)
    assert zero_ == [({"cpu"}, {0})] * 2
    assert one == [({"meta"}, {0})] * 2


def logits_of_a_partitioned_model() -> tuple[bool, set[int]]:
    """Computed before an engine holds it, as the check of packing does; what is left gathered afterwards."""
    model, tokens = make(Case(mode="merge-aware"), dist.get_rank()), batch(0, 0)
    expected = model(input_ids=tokens).logits
    prepare_for_deepspeed(model, zero.config(3))
    with torch.no_grad(), zero3.gathering(model):
        found = [model(input_ids=tokens).logits for _ in range(2)]
    return all(torch.equal(logits, expected) for logits in found), {p.numel() for p in model.parameters()}


def test_a_partitioned_model_computes_by_blocks() -> None:
    for same, left in run(2, logits_of_a_partitioned_model, timeout=TIMEOUT):
        assert same and left == {0}


def damaged_part() -> tuple[str, str]:
    model = make(Case(), dist.get_rank())
    expected = {name: tensor_digest(p) for name, p in model.named_parameters()}
    settings = prepare_for_deepspeed(model, zero.config(3))
    assert settings["zero_optimization"]["stage"] == 3
    if dist.get_rank() == 1:
        next(p for p in model.parameters() if p.dtype == torch.uint8).ds_tensor[0] ^= 1
    return text_of_error(zero3.compare_parts, model, expected, 60.0)


def test_damage_on_the_way_is_found() -> None:
    zero_, one = run(2, damaged_part, timeout=TIMEOUT)
    assert zero_ == one and "q_proj.base_layer.qdata and 0 more" in zero_[1]


def different_models() -> tuple[str, str]:
    model = make(Case(), dist.get_rank())
    if dist.get_rank() == 1:
        next(iter(nvfp4_modules(model).values())).dtype = torch.bfloat16
    return text_of_error(prepare_for_deepspeed, model, zero.config(3))


def test_stage_3_compares_the_ranks_before_it_partitions() -> None:
    zero_, one = run(2, different_models, timeout=TIMEOUT)
    assert zero_ == one and zero_[0] == "ValueError" and "rank 1, " in zero_[1]


def cast_and_save(stage: int, folder: str) -> tuple[dict[str, float], bool, float]:
    """The engine casts to bf16, steps and saves (SCENARIOS n9, n11): adapter file, base, share of the base at rest."""
    model = make(Case(), dist.get_rank())
    for layer in nvfp4_modules(model).values():
        layer.global_scale.copy_(torch.tensor([1.0012345]).view(torch.uint8))  # bf16 would round it
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    settings = prepare_for_deepspeed(model, zero.config(stage) | {"bf16": {"enabled": True}})
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    assert stage < 3 or floats == {torch.bfloat16}
    engine = zero.initialize(model, settings)
    engine.backward(1e-6 * loss_of(engine, batch(0, dist.get_rank())))
    engine.step()
    save_adapter(engine.module, folder)
    after = zero.whole_base(engine.module)
    at_rest = sum(getattr(p, "ds_tensor", p).numel() for p in engine.module.parameters() if p.dtype == torch.uint8)
    live = {n: t.float().sum().item() for n, t in gather_trainable(engine.module).items()}
    return (
        live,
        all(torch.equal(after[n], t) for n, t in before.items()),
        at_rest / sum(map(torch.numel, before.values())),
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cast_step_and_save(stage: int, tmp_path: Path) -> None:
    (live, intact, share), (_, other, _) = run(2, cast_and_save, stage, str(tmp_path), timeout=TIMEOUT)
    assert intact and other
    assert share == pytest.approx(0.5 if stage == 3 else 1.0, rel=0.01)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == len(live)
    for name, tensor in saved.items():
        rows, columns = tensor.shape
        assert (rows if "lora_A" in name else columns) == 4 and tensor.numel() > 4
        assert tensor.float().sum().item() == live[name.replace(".weight", ".default.weight")]


def loses_a_factor(folder: str) -> list[tuple[str, str]]:
    """What a save outside of our gathering would write: empty factors."""
    model = make(Case(), dist.get_rank())
    if dist.get_rank() == 0:
        name = next(n for n, _ in model.named_parameters() if "lora_B" in n)
        model.get_parameter(name).data = torch.empty(0)
    return [text_of_error(save_adapter, model, folder)]


def test_an_empty_factor_is_refused_on_all_ranks(tmp_path: Path) -> None:
    zero_, one = run(2, loses_a_factor, str(tmp_path / "adapter"))
    assert zero_ == one
    assert "lora_B: gathered as [0], expected [32, 4]; nothing was written" in zero_[0][1]
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, "stage is 4, expected one of"),
        ({"stage": 3, "zero_quantized_weights": True}, "quantize the packed codes a second time; remove it"),
        ({"stage": 3, "mics_shard_size": 2}, "MiCS"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "device is nvme"),
    ],
)
def test_refused_configs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_config({"zero_optimization": options})


def test_config_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the path of a JSON file"):
        read_deepspeed_config(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        read_deepspeed_config(tmp_path / "bad.json")
