"""`halfbyte train` on several ranks: the same run as on one, saved by one rank, resumed on any number of ranks.

Data order depends on the number of examples per optimizer step alone: batches are dealt to ranks in turn, so a step
takes the same examples on 1, 2 and 4 ranks, and its loss is a mean over all their tokens. What differs is the order of
fp32 additions, hence 1e-5 on the adapter. On the same number of ranks nothing differs, hence equal bits.
"""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfbyte.checkpoint import resume
from halfbyte.train import trainer
from halfbyte.train.config import build_config
from halfbyte.train.files import METRICS, read_metrics
from halfbyte.train.trainer import train
from tests.dist import outcomes, run
from tests.parallel.training import error
from tests.train import tiny

EXAMPLES_PER_STEP = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, Any]:
    """Six steps of four examples over one and a half epochs."""
    folder = tmp_path_factory.mktemp("ddp")
    base = tiny.save_base(folder / "base", tie_word_embeddings=False)
    rows = tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16))
    held_out = tiny.write_lines(folder / "held_out.jsonl", tiny.chat_rows(8))
    return {
        "base_model": str(base),
        "datasets": [str(rows)],
        "test_datasets": [str(held_out)],
        "sequence_len": 128,
        "micro_batch_size": 1,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "save_steps": 3,
        "device": "cpu",
    }


def train_rank(settings: dict[str, Any], output_dir: str, **changes: Any) -> tuple[int, float | None]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    values = {**settings, "output_dir": output_dir, "gradient_accumulation_steps": EXAMPLES_PER_STEP // ranks}
    result = train(build_config(values | changes))
    return result.step, result.loss_after


def resume_rank(settings: dict[str, Any], output_dir: str, checkpoint: str | bool) -> tuple[int, float | None]:
    return train_rank(settings, output_dir, resume_from_checkpoint=checkpoint)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def losses(output_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(output_dir / METRICS) if "loss" in row]


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> tuple[Path, float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "alone"
    _, loss = train_rank(settings, str(folder))
    torch.set_num_threads(threads)
    return folder, loss


@pytest.fixture(scope="module")
def on_two(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    zero, one = run(2, train_rank, settings, str(folder), timeout=120)
    assert zero == one
    return folder


def test_two_ranks_equal_one(alone, on_two) -> None:
    folder, _ = alone
    assert losses(on_two) == pytest.approx(losses(folder), rel=1e-5)
    assert error(adapter_of(on_two / "adapter"), adapter_of(folder / "adapter")) < 1e-5
    evaluations = [[r["eval_loss"] for r in read_metrics(f / METRICS) if "eval_loss" in r] for f in (folder, on_two)]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


def test_one_rank_writes_a_complete_checkpoint(on_two) -> None:
    assert [path.name for path in resume.complete_checkpoints(on_two)] == ["checkpoint-3", "checkpoint-6"]
    assert not resume.staging_folder(on_two).exists()
    names = {path.name for path in (on_two / "checkpoint-3").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "adapter_model.safetensors"} <= names


def test_resumed_on_one_rank(alone, on_two, settings, tmp_path) -> None:
    train_rank(settings, str(tmp_path / "out"), resume_from_checkpoint=str(on_two / "checkpoint-3"))
    assert losses(tmp_path / "out") == pytest.approx(losses(alone[0])[3:], rel=1e-5)
    assert error(adapter_of(tmp_path / "out" / "adapter"), adapter_of(alone[0] / "adapter")) < 1e-5


def test_resumed_on_four_ranks(alone, settings, tmp_path) -> None:
    run(4, resume_rank, settings, str(tmp_path / "out"), str(alone[0] / "checkpoint-3"), timeout=120)
    assert losses(tmp_path / "out") == pytest.approx(losses(alone[0])[3:], rel=1e-5)
    assert error(adapter_of(tmp_path / "out" / "adapter"), adapter_of(alone[0] / "adapter")) < 1e-5


def test_another_number_of_examples_per_step_is_refused(on_two, settings, tmp_path) -> None:
    with pytest.raises(ValueError, match="written with examples per step 4, this run has 2"):
        changed = settings | {"resume_from_checkpoint": str(on_two / "checkpoint-3")}
        train_rank(changed, str(tmp_path / "out"), gradient_accumulation_steps=2)


def train_with_a_fault_in_the_second_save(settings: dict[str, Any], output_dir: str, victim: int | None) -> str:
    """The disk fills (no victim) or a rank is killed while the checkpoint of step 6 is being written.

    Rank zero fails between the adapter and the optimizer; rank one dies before it has written its random state.
    """
    steps = 0

    def between_two_files(optimizer: torch.optim.Optimizer) -> None:
        assert list(resume.staging_folder(Path(output_dir)).glob("checkpoint-6/adapter_model.safetensors"))
        if victim is None:
            raise OSError(28, "No space left on device")
        os.kill(os.getpid(), signal.SIGKILL)

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6 and victim == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == 6 and victim != 1:
            optimizer.register_state_dict_pre_hook(between_two_files)

    hook = register_optimizer_step_post_hook(count)
    try:
        train_rank(settings, output_dir, save_total_limit=1)
    except OSError as error:
        return str(error)
    finally:
        hook.remove()
    return ""


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_saving_and_resumed_is_the_same_run(victim, on_two, settings, tmp_path) -> None:
    out = tmp_path / "out"
    results = outcomes(2, train_with_a_fault_in_the_second_save, settings, str(out), victim, timeout=60, grace=1)
    assert results[victim].exitcode == -signal.SIGKILL
    assert [path.name for path in resume.complete_checkpoints(out)] == ["checkpoint-3"]
    run(2, resume_rank, settings, str(out), True, timeout=120)
    expected, found = adapter_of(on_two / "checkpoint-6"), adapter_of(out / "checkpoint-6")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    states = [torch.load(f / "checkpoint-6" / "optimizer.pt")["state"] for f in (on_two, out)]
    assert all(torch.equal(states[0][i][key], states[1][i][key]) for i in states[0] for key in states[0][i])


def test_a_full_disk_on_rank_zero_is_the_error_of_all(settings, tmp_path) -> None:
    zero, one = run(2, train_with_a_fault_in_the_second_save, settings, str(tmp_path / "out"), None, timeout=120)
    for text in (zero, one):
        assert "checkpoint-6: could not be saved: the disk is full" in text and "checkpoint-3 is complete" in text
    assert [path.name for path in resume.complete_checkpoints(tmp_path / "out")] == ["checkpoint-3"]


def train_with_a_slow_save(settings: dict[str, Any], output_dir: str) -> None:
    """Rank zero pauses between two files of the second save, for longer than rank one waits."""

    def pause(optimizer: torch.optim.Optimizer) -> None:
        written = resume.staging_folder(Path(output_dir)) / "checkpoint-6" / "adapter_model.safetensors"
        if written.exists():
            time.sleep(4)
            assert written.exists(), "rank 1 has deleted what rank 0 is writing"

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.register_state_dict_pre_hook(pause)

    trainer.SAVE_TIMEOUT_S = 5.0 if dist.get_rank() == 0 else 2.0  # of a worker that is thrown away, for it raises
    register_optimizer_step_post_hook(hook)
    train_rank(settings, output_dir)


def test_a_rank_that_gives_up_waiting_leaves_what_rank_zero_writes(settings, tmp_path) -> None:
    zero, one = outcomes(2, train_with_a_slow_save, settings, str(tmp_path / "out"), timeout=90)
    assert "nothing came from rank 0. That process" in str(one.error)
    assert "nothing came from rank 1. That process" in str(zero.error)
    assert "Mend that" in str(zero.error) and not resume.staging_folder(tmp_path / "out").exists()


OTHER_CONFIGS = {
    "learning_rate": (0.1, "rank 1 has learning_rate 0.1, rank 0 has 0.01; give every rank the same config"),
    "lora_alpha": (64, "rank 1 has lora_alpha 64.0, rank 0 has 32.0"),
    "lora_r": (8, "rank 1 has lora_r 8, rank 0 has 4"),
    "max_steps": (3, "rank 1 has max_steps 3, rank 0 has 6"),
    "save_steps": (2, "rank 1 has save_steps 2, rank 0 has 3"),
    "output_dir": ("elsewhere", "rank 1 has output_dir elsewhere, rank 0 has "),
    "resume_from_checkpoint": ("checkpoint-3", "rank 1 has resume_from_checkpoint checkpoint-3, rank 0 has False"),
    "datasets": ([{"path": "other.jsonl"}], "rank 1 has datasets.0.path other.jsonl, rank 0 has "),
    "fsdp": (True, "rank 1 has fsdp True, rank 0 has False"),
}


def refusal(settings: dict[str, Any], output_dir: str, changes: dict[str, Any]) -> str:
    try:
        train_rank(settings, **{"output_dir": output_dir, **changes})
    except (ValueError, RuntimeError) as refused:
        return f"{type(refused).__name__}: {refused}"
    return ""


def train_with_other_configs_on_rank_one(settings: dict[str, Any], output_dir: str) -> dict[str, str]:
    """The refusal of each key in OTHER_CONFIGS, then of two at once."""
    one = dist.get_rank() == 1
    changes = {key: {key: value} for key, (value, _) in OTHER_CONFIGS.items()}
    changes["two"] = {"learning_rate": 0.1, "max_steps": 3}
    return {key: refusal(settings, output_dir, change if one else {}) for key, change in changes.items()}


def test_ranks_with_other_configs_are_refused_on_all(settings, tmp_path) -> None:
    """Before anything is read: some would train to the end and save rank 0's adapter, others hang in a checkpoint."""
    zero, one = run(2, train_with_other_configs_on_rank_one, settings, str(tmp_path / "out"), timeout=60)
    assert zero == one
    for key, (_, sentence) in OTHER_CONFIGS.items():
        assert zero[key].startswith(f"ValueError: {sentence}"), zero[key]
    assert "rank 1 has max_steps 3 and learning_rate 0.1, rank 0 has 6 and 0.01; give" in zero["two"]
    assert not (tmp_path / "out").exists()


def train_from_folders(
    settings: dict[str, Any], output_dir: str, folders: list[str], changes: dict[str, Any], names: list[str]
) -> list[str]:
    """One config, but its relative paths mean each rank's own files, as on hosts that share no file system."""
    before = Path.cwd()
    os.chdir(folders[dist.get_rank()])
    try:
        return [refusal(settings, output_dir, {**changes, "datasets": [name]}) for name in names]
    finally:
        os.chdir(before)


def test_ranks_that_find_other_files_are_refused_on_all(settings, tmp_path) -> None:
    folders = [tmp_path / "zero", tmp_path / "one"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16 - number))
    tiny.write_lines(folders[0] / "missing.jsonl", tiny.chat_rows(16))
    places = [str(folder) for folder in folders]
    names = ["missing.jsonl", "rows.jsonl"]
    zero, one = run(2, train_from_folders, settings, str(tmp_path / "out"), places, {}, names, timeout=60)
    assert zero == one and "rank 1: FileNotFoundError: missing.jsonl" in zero[0]
    assert "rank 1 has training data" in zero[1] and "give every rank the same data" in zero[1]


def test_ranks_that_find_other_checkpoints_are_refused_on_all(on_two, settings, tmp_path) -> None:
    """The newest on rank 1 is older, as when the last copy between hosts failed; or it has none and starts anew."""
    places = [str(tmp_path / "zero"), str(tmp_path / "one")]
    for place, steps in zip(places, ((3, 6), (3,)), strict=True):
        for step in steps:
            shutil.copytree(on_two / f"checkpoint-{step}", Path(place) / "out" / f"checkpoint-{step}")
    auto = {"resume_from_checkpoint": "auto"}
    rows = settings["datasets"]
    zero, one = run(2, train_from_folders, settings, "out", places, auto, rows, timeout=60)
    assert zero == one and "rank 1 has steps already taken 3, rank 0 has 6; give every rank" in zero[0]
    shutil.rmtree(tmp_path / "one" / "out")
    zero, one = run(2, train_from_folders, settings, "out", places, auto, rows, timeout=60)
    assert zero == one and "rank 1 has steps already taken 0, rank 0 has 6" in zero[0]


def train_from_own_base(settings: dict[str, Any], output_dir: str, bases: list[str]) -> str:
    return refusal(settings, output_dir, {"base_model": bases[dist.get_rank()], "max_steps": 1})


def test_a_base_may_lie_elsewhere_on_another_rank(settings, tmp_path) -> None:
    shutil.copytree(settings["base_model"], tmp_path / "copy")
    bases = [settings["base_model"], str(tmp_path / "copy")]
    assert run(2, train_from_own_base, settings, str(tmp_path / "out"), bases, timeout=60) == ["", ""]
