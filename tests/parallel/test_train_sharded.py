"""`halfbyte train` with `deepspeed: path.json`: the run of one process, saved whole, resumed bit for bit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.train.config import build_config
from halfbyte.train.trainer import train
from tests.dist import run
from tests.parallel import zero
from tests.parallel.test_deepspeed import TIMEOUT, built  # noqa: F401 - the fixture that compiles the op
from tests.parallel.test_train_ddp import EXAMPLES_PER_STEP, adapter_of, losses
from tests.parallel.training import error
from tests.train import tiny

pytestmark = pytest.mark.timeout(1200)  # the first test waits for a compiler


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("zero")
    return {
        "base_model": str(tiny.save_base(folder / "base", tie_word_embeddings=False)),
        "datasets": [str(tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16)))],
        "sequence_len": 128,
        "micro_batch_size": 1,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "lora_modules_to_save": ["lm_head"],
        "save_steps": 2,
        "bf16": False,
    }


def train_rank(settings: dict[str, Any], output_dir: str, stage: int | None, changes: dict[str, Any]) -> str:
    """One run on this rank; returns the error, if it was refused."""
    values = {**settings, "output_dir": output_dir}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if stage is not None:
        os.environ |= zero.environment()
        path = Path(output_dir).parent / f"zero{stage}.json"
        if dist.get_rank() == 0:
            path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        dist.barrier()
        values["deepspeed"] = str(path)
    try:
        train(build_config(values | {"gradient_accumulation_steps": EXAMPLES_PER_STEP // ranks} | changes))
    except (ValueError, RuntimeError, OSError) as refused:
        return str(refused)
    return ""


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    assert train_rank(settings, str(folder), None, {}) == ""
    return folder


def train_and_resume(settings: dict[str, Any], folder: str, stage: int) -> list[str]:
    checkpoint = {"resume_from_checkpoint": f"{folder}/whole/checkpoint-2"}
    return [
        train_rank(settings, f"{folder}/whole", stage, {}),
        train_rank(settings, f"{folder}/resumed", stage, checkpoint),
    ]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_two_ranks_equal_a_run_without_deepspeed_and_resume(stage: int, alone, settings, tmp_path) -> None:
    """Accelerate finds DeepSpeed on CPUs by the state that train/build.py makes for it."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(2, train_and_resume, settings, str(tmp_path), stage, timeout=TIMEOUT) == [["", ""]] * 2
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
    assert error(adapter_of(whole / "adapter"), adapter_of(alone / "adapter")) < 1e-5
    assert error(adapter_of(resumed / "adapter"), adapter_of(whole / "adapter")) == 0
    assert all(tensor.numel() for tensor in adapter_of(whole / "checkpoint-2").values())
    if stage == 3:
        assert_no_other_launch_reads(settings, whole / "checkpoint-2")


def assert_no_other_launch_reads(settings: dict[str, Any], checkpoint: Path) -> None:
    """Another engine, stage or number of ranks is refused before weights load: no states are silently left out."""
    wanted = {"resume_from_checkpoint": str(checkpoint)}
    out = str(checkpoint.parents[1] / "out")
    assert "ZeRO stage 3, this run has" in train_rank(settings, out, None, wanted)
    assert "ZeRO stage 3, this run has 2" in run(2, train_rank, settings, out, 2, wanted, timeout=TIMEOUT)[0]
    assert "DeepSpeed wrote it on 2 ranks" in run(1, train_rank, settings, out, 3, wanted, timeout=TIMEOUT)[0]


def merge_aware_rank(settings: dict[str, Any], output_dir: str, stage: int) -> str:
    return train_rank(settings, output_dir, stage, {"merge_aware": True})


def test_merge_aware_under_zero3_records_what_it_trained(settings, tmp_path) -> None:
    """Metadata equal to the unsharded run's: base and merged weights are gathered layer by layer for their digests."""
    assert train_rank(settings, str(tmp_path / "alone"), None, {"merge_aware": True}) == ""
    assert run(2, merge_aware_rank, settings, str(tmp_path / "zero"), 3, timeout=TIMEOUT) == ["", ""]
    found, expected = (
        json.loads((tmp_path / name / "adapter" / "adapter_config.json").read_text())["halfbyte"]
        for name in ("zero", "alone")
    )
    assert error(adapter_of(tmp_path / "zero" / "adapter"), adapter_of(tmp_path / "alone" / "adapter")) < 1e-3
    assert found["base_digest"] == expected["base_digest"] and found["mode"] == "merge-aware"
    assert len(found["merged_digest"]) == 64
    adapter, merged = tmp_path / "zero" / "adapter", tmp_path / "merged"
    merge_checkpoint(settings["base_model"], adapter, merged, min_retained=0.5)  # it compares that digest


def zero_and_then_fsdp(settings: dict[str, Any], folder: str) -> list[str]:
    short = {"max_steps": 1, "save_steps": None}
    first = train_rank(settings, f"{folder}/zero", 2, short)
    return [first, train_rank(settings, f"{folder}/fsdp", None, short | {"fsdp": True})]


def test_a_later_run_in_the_same_process_is_no_deepspeed_run(settings, tmp_path) -> None:
    """Trainer leaves ACCELERATE_USE_DEEPSPEED behind, which a second run would follow."""
    assert run(2, zero_and_then_fsdp, settings, str(tmp_path), timeout=TIMEOUT) == [["", ""]] * 2


def test_deepspeed_outside_of_a_launch_is_refused(settings, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(ValueError, match="not part of a launch; start it with: torchrun"):
        train(build_config({**settings, "output_dir": str(tmp_path / "out"), "deepspeed": str(tmp_path / "zero.json")}))


@pytest.mark.parametrize("version", ["1", "2"])
def test_fsdp_launches_are_refused_before_loading(version: str, settings, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    text = train_rank(settings, str(tmp_path / "out"), None, {})
    assert f"asks for FSDP {version}" in text and "set fsdp: true" in text
