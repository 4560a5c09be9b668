"""`halfbyte train` prints its plan and refuses what cannot fit, before any weight is read."""

from pathlib import Path

import pytest
import torch

from halfbyte.train import build
from halfbyte.train import plan as train_plan
from halfbyte.train.config import build_config
from halfbyte.train.trainer import train
from tests.train import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("plan") / "base")


def config_of(base: Path, out: Path, **changes):
    rows = tiny.write_lines(out.parent / "rows.jsonl", tiny.chat_rows(8))
    values = {"base_model": str(base), "datasets": [str(rows)], "output_dir": str(out), "device": "cpu"}
    return build_config({**values, "max_steps": 1, "sequence_len": 128, **changes})


def test_a_small_run_is_never_refused_and_shows_its_plan(base, tmp_path, capsys) -> None:
    train(config_of(base, tmp_path / "run"))
    text = capsys.readouterr().out
    assert "Plan, one process: GB on the CPU of" in text and "peak (" in text
    assert "1 x 4" in text  # the longest example, not sequence_len


def test_refused_with_the_remedy_before_any_weight(base, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    monkeypatch.setattr(train_plan, "host_bytes", lambda: 10**8)
    with pytest.raises(
        ValueError, match=r"needs about 0\.(79|8\d) GB .*this machine has 0\.10 GB.*take a smaller model"
    ):
        train(config_of(base, tmp_path / "run"))
    monkeypatch.setattr(train_plan, "host_bytes", lambda: None)
    monkeypatch.setattr(build, "load_model", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("went on")))
    with pytest.raises(RuntimeError, match="went on"):
        train(config_of(base, tmp_path / "other"))


def test_the_remedy_is_a_setting_that_fits(base, tmp_path, monkeypatch) -> None:
    """A GPU that holds the run in smaller micro-batches: as many examples a step."""
    config = config_of(base, tmp_path / "run", micro_batch_size=16384)
    monkeypatch.setattr(train_plan, "gpu_bytes", lambda: 6e9)
    with pytest.raises(
        ValueError,
        match=r"each GPU has 6\.00 GB\. This needs .* GB: micro_batch_size: 1024, gradient_accumulation_steps: 16,",
    ):
        train_plan.check_fits(config, base, torch.device("cuda"), 128, 1)
    monkeypatch.setattr(train_plan, "gpu_bytes", lambda: 141e9)
    train_plan.check_fits(config, base, torch.device("cuda"), 128, 1)


def test_settings_of_a_run() -> None:
    values = {"base_model": "b", "datasets": ["d.jsonl"], "output_dir": "o", "sequence_len": 512}
    run = build_config({**values, "merge_aware": True, "lora_target_modules": ["q_proj"], "micro_batch_size": 2})
    found = train_plan.settings_of(run, "cuda", longest=100)
    assert (found.forward, found.sequence_len, found.bf16, found.masked) == ("merge-aware", 100, True, True)
    packed = build_config({**values, "sample_packing": True})
    assert train_plan.settings_of(packed, "cpu", longest=100).sequence_len == 512
    assert not train_plan.settings_of(packed, "cpu").bf16 and train_plan.settings_of(packed, "cpu").masked


@pytest.mark.parametrize(
    ("changes", "ranks", "name"),
    [
        ({}, 1, "one process"),
        ({}, 4, "DDP 4"),
        ({"fsdp": True}, 4, "FSDP2 4"),
        ({"fsdp": True, "dp_replicate_size": 2}, 4, "HSDP, 2 x 2"),
        ({"tensor_parallel_size": 2}, 4, "TP 2 x DDP 2"),
        ({"tensor_parallel_size": 2}, 2, "TP 2"),
    ],
)
def test_engine_of_a_run(changes, ranks, name) -> None:
    run = build_config({"base_model": "b", "datasets": ["d.jsonl"], "output_dir": "o", **changes})
    assert train_plan.engine_of(run, ranks).name == name
