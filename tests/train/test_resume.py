"""Killed and resumed is the same run, bit for bit: adapter, full modules, optimizer, scheduler, random state, data.

On a CPU every operation of a step is deterministic for a fixed number of threads, so nothing short of equal bits is
right; a difference would mean that a state was not saved, or the data started anew (SCENARIOS n8).
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoint import resume
from halfbyte.train.config import dump_config
from halfbyte.train.files import METRICS, read_metrics
from halfbyte.train.trainer import train

# Trains, and is killed by the system in the middle of writing its third checkpoint: the adapter of step 9 is in the
# staging folder, its optimizer is not.
KILLED = """
import os, signal, sys
import torch
from halfbyte.train.config import load_config
from halfbyte.train.trainer import Trainer, train

def die_at_nine(self, output_dir):
    if self.state.global_step == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, output_dir)

save, Trainer._save_optimizer_and_scheduler = Trainer._save_optimizer_and_scheduler, die_at_nine
torch.set_num_threads(1)
train(load_config(sys.argv[1]))
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("run") / "uninterrupted"
    train(config(output_dir))
    return output_dir


@pytest.fixture(scope="module")
def killed(config, tmp_path_factory):
    """A run that was killed while it saved; its folder is as the kill left it."""
    output_dir = tmp_path_factory.mktemp("run") / "killed"
    path = output_dir.with_suffix(".yaml")
    path.write_text(dump_config(config(output_dir, save_steps=3)))
    child = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert child.returncode == -signal.SIGKILL
    return output_dir


def assert_same(left, right) -> None:
    """Equal bits and structure, NaN and all."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def test_the_kill_left_complete_checkpoints_and_a_torn_one_apart(killed) -> None:
    assert [path.name for path in resume.complete_checkpoints(killed)] == ["checkpoint-3", "checkpoint-6"]
    assert (resume.staging_folder(killed) / "checkpoint-9" / "adapter_model.safetensors").exists()
    assert not (killed / "adapter").exists()


def test_resumed_equals_uninterrupted(uninterrupted, killed, config, capsys) -> None:
    """12 steps, against 8 and a half, a SIGKILL, and a resume from step 6, in the middle of the second epoch."""
    train(config(killed, save_steps=3, resume_from_checkpoint=True))
    assert f"{killed / 'checkpoint-6'}: going on after step 6 of 12" in capsys.readouterr().out
    left, right = uninterrupted / "checkpoint-12", killed / "checkpoint-12"
    adapter = load_file(left / "adapter_model.safetensors")
    assert any("lm_head" in key for key in adapter) and any("lora_B" in key for key in adapter)
    assert_same(adapter, load_file(right / "adapter_model.safetensors"))
    assert_same(adapter, load_file(killed / "adapter" / "adapter_model.safetensors"))
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same(torch.load(left / name), torch.load(right / name))
    states = [torch.load(folder / "rng_state.pth", weights_only=False) for folder in (left, right)]
    assert torch.equal(states[0]["cpu"], states[1]["cpu"]) and states[0]["python"] == states[1]["python"]
    assert not resume.staging_folder(killed).exists()


def test_the_metrics_read_as_one_run(uninterrupted, killed) -> None:
    """Every step once, with the same loss: steps 7 and 8, lost in the kill, were taken again on the same data."""
    curves = [
        [(row["step"], row["loss"], row["learning_rate"]) for row in read_metrics(folder / METRICS) if "loss" in row]
        for folder in (uninterrupted, killed)
    ]
    assert [step for step, _, _ in curves[0]] == list(range(1, 13))
    assert curves[0] == curves[1]


def test_a_run_killed_after_its_last_checkpoint_gives_its_adapter(killed, config, capsys) -> None:
    """Nothing is trained further: what is published is the last checkpoint's adapter, in the files of any run."""
    import shutil

    names = sorted(path.name for path in (killed / "adapter").iterdir())
    shutil.rmtree(killed / "adapter")
    result = train(config(killed, resume_from_checkpoint=True))
    assert result.step == 12 and "all steps have been taken" in capsys.readouterr().out
    assert sorted(path.name for path in result.adapter.iterdir()) == names
    assert_same(*(load_file(path / "adapter_model.safetensors") for path in (killed / "checkpoint-12", result.adapter)))
    assert sorted(path.name for path in killed.glob("checkpoint-*"))[:2] == ["checkpoint-12", "checkpoint-3"]


def test_auto_starts_anew_in_a_folder_whose_run_died_early(config, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("left by a run that was killed before its first checkpoint")
    assert train(config(tmp_path, resume_from_checkpoint="auto", max_steps=2)).step == 2
    assert train(config(tmp_path, resume_from_checkpoint="auto", max_steps=3)).step == 3


def test_another_base_is_refused(killed, config, tmp_path, base) -> None:
    """Same shapes, one code changed: the digest of the base that the adapter records differs."""
    import shutil

    from safetensors import safe_open
    from safetensors.torch import save_file

    other = tmp_path / "other"
    shutil.copytree(base, other)
    with safe_open(other / "model.safetensors", "pt") as file:
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["model.layers.1.mlp.up_proj._weight_qdata"][3, 5] ^= 1
    save_file(tensors, other / "model.safetensors", about)
    checkpoint = str(killed / "checkpoint-6")
    with pytest.raises(
        ValueError, match=r"checkpoint-6: .*another base: 1 of 14 layers differ.*layers\.1\.mlp\.up_proj"
    ):
        train(config(tmp_path / "out", base_model=str(other), resume_from_checkpoint=checkpoint))


def test_other_data_is_refused(killed, config, tmp_path, rows) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(rows.read_text().splitlines(keepends=True)[:19]))
    with pytest.raises(ValueError, match="written with training data"):
        train(config(killed, datasets=[str(fewer)], resume_from_checkpoint=True))


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adamw4bit", "adamwfp8"])
def test_low_bit_states_are_restored_bit_for_bit(optimizer, config, tmp_path) -> None:
    """From step 3 again to step 6: the same adapter and states. The factors are large, so that states are quantized."""
    changes = {"optimizer": optimizer, "save_steps": 3, "max_steps": 6, "lora_r": 64}
    train(config(tmp_path / "out", **changes))
    first = tmp_path / "out" / "checkpoint-6"
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "first")
    train(config(tmp_path / "out", **changes, resume_from_checkpoint=True))
    assert_same(*(load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "first", first)))
    states = [torch.load(folder / "optimizer.pt") for folder in (tmp_path / "first", first)]
    assert_same(*states)
    dtypes = {
        value.dtype for state in states[0]["state"].values() for value in state.values() if torch.is_tensor(value)
    }
    assert dtypes & {torch.uint8, torch.int8, torch.float8_e4m3fn}


def test_a_full_disk_loses_nothing(config, tmp_path, monkeypatch) -> None:
    """The optimizer of step 6 does not fit: step 3 stays, nothing half-written stays, and the run can go on."""
    from halfbyte.train.trainer import Trainer

    real = Trainer._save_optimizer_and_scheduler

    def full_at_six(self, output_dir):
        if self.state.global_step == 6:
            raise OSError(28, "No space left on device")
        return real(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full_at_six)
    output_dir = tmp_path / "out"
    with pytest.raises(OSError, match="checkpoint-6: could not be saved: the disk is full.*checkpoint-3 is complete"):
        train(config(output_dir, save_steps=3, save_total_limit=1))
    assert [path.name for path in output_dir.glob("checkpoint-*")] == ["checkpoint-3"]
    assert not resume.staging_folder(output_dir).exists()
    monkeypatch.undo()
    train(config(output_dir, save_steps=3, save_total_limit=1, resume_from_checkpoint=True))
    assert [path.name for path in output_dir.glob("checkpoint-*")] == ["checkpoint-12"]
    assert json.loads((output_dir / "adapter" / "adapter_config.json").read_text())["halfbyte"]["base_digest"]
