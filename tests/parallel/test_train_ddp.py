"""`halfbyte train` on several ranks: the same run as on one, saved by one rank, resumed on any number of ranks.

Data order depends on the number of examples per optimizer step alone: batches are dealt to ranks in turn, so a step
takes the same examples on 1, 2 and 4 ranks, and its loss is a mean over all their tokens. What differs is the order of
fp32 additions, hence 1e-5 on the adapter. On the same number of ranks nothing differs, hence equal bits.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfbyte.checkpoint import resume
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


def train_with_another_rank_on_rank_one(settings: dict[str, Any], output_dir: str) -> str:
    changes = {"lora_r": 8} if dist.get_rank() == 1 else {}
    try:
        train_rank(settings, output_dir, **changes)
    except ValueError as error:
        return str(error)
    return ""


def bad_data_on_rank_one(settings: dict[str, Any], output_dir: str) -> str:
    changes = {"datasets": ["missing.jsonl"]} if dist.get_rank() == 1 else {}
    try:
        train_rank(settings, output_dir, **changes)
    except RuntimeError as error:
        return str(error)
    return ""


def test_differing_ranks_are_refused_on_all(settings, tmp_path) -> None:
    zero, one = run(2, train_with_another_rank_on_rank_one, settings, str(tmp_path / "a"))
    assert zero == one and "lora_A" in zero and "shape is [8, 64], expected [4, 64] as on rank 0" in zero
    zero, one = run(2, bad_data_on_rank_one, settings, str(tmp_path / "b"))
    assert zero == one and "rank 1: FileNotFoundError: missing.jsonl" in zero
