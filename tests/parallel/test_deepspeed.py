"""LoRA on a packed base under DeepSpeed ZeRO-1, 2 and 3, compared with one process on the same micro-batches.

They must agree as under DDP: the stages differ in who holds which state, not in what is computed; the optimizer works
element by element on flat fp32 partitions.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from halfbyte.lora.merge_aware import merge_aware_layers
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel.deepspeed import check_config, prepare_for_deepspeed, read_deepspeed_config
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


def compare(case: Case, stage: int, options: dict[str, Any]) -> tuple[float, float, bool]:
    """Error of the adapter; share of merged codes that differ; whether the base's bytes are as they were."""
    model = make(case, dist.get_rank())
    expected = one_process(case, dist.get_world_size()).adapter
    settings = prepare_for_deepspeed(model, zero.config(stage, **options))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    engine = zero.initialize(model, settings)
    zero.take_steps(engine)
    found, after = gather_trainable(engine.module), zero.whole_base(engine.module)
    flips = flipped_codes(case, found, expected) if "merge-aware" in case.mode else 0.0
    return error(found, expected), flips, all(torch.equal(after[n], t) for n, t in before.items())


def flipped_codes(case: Case, found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Share of the merged weight's bytes in which two adapters differ."""
    merged = []
    for adapter in (found, expected):
        model = make(case)
        model.load_state_dict(adapter, strict=False)
        merged.append([layer.merged_weight().qdata for layer in merge_aware_layers(model).values()])
    pairs = list(zip(*merged, strict=True))
    return sum((a != b).sum().item() for a, b in pairs) / sum(a.numel() for a, _ in pairs)


@pytest.mark.parametrize("mode", ["plain", "dynamic", "merge-aware", "merge-aware dynamic"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_equal_one_process(stage: int, mode: str) -> None:
    """A last-bit difference of a factor can move a merged weight across its threshold, and that code counts in later
    gradients: of the final codes up to 1 in 1,000 may differ, and a merge-aware adapter need agree to 1e-3 only."""
    for adapter, flips, intact in run(2, compare, Case(mode=mode), stage, {}, timeout=TIMEOUT):
        assert intact
        assert flips < 1e-3
        assert adapter < (1e-3 if "merge-aware" in mode else 1e-5)


OFFLOAD = {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("stage", "options"),
    [(2, {"offload_optimizer": OFFLOAD}), (3, {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD})],
)
def test_offload(stage: int, options: dict[str, Any]) -> None:
    for adapter, _, intact in run(2, compare, Case(on_meta=True), stage, options, timeout=TIMEOUT):
        assert adapter < 1e-5 and intact


def test_four_ranks() -> None:
    for adapter, _, intact in run(4, compare, Case(on_meta=True, differently_seeded=True), 3, {}, timeout=TIMEOUT):
        assert adapter < 1e-5 and intact


def cast_and_save(stage: int, folder: str) -> tuple[dict[str, float], bool, float]:
    """The engine casts to bf16, steps and saves (SCENARIOS n9, n11): adapter file, base, share of the base at rest."""
    model = make(Case(), dist.get_rank())
    for layer in nvfp4_modules(model).values():
        layer.global_scale.copy_(torch.tensor([1.0012345]).view(torch.uint8))  # bf16 would round it
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    settings = prepare_for_deepspeed(model, zero.config(stage) | {"bf16": {"enabled": True}})
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


@pytest.mark.parametrize("stage", [2, 3])
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
