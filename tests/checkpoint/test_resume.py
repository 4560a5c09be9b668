"""A checkpoint is complete or not there: the marker, the rename, rotation, and what a user is told."""

import errno
import json
import shutil

import pytest

from halfbyte.checkpoint import resume

RUN = {"training data": "abc", "seed": 42}


def write_checkpoint(output_dir, step: int, run=RUN):
    staged = resume.staging_folder(output_dir) / f"checkpoint-{step}"
    (staged / "sub").mkdir(parents=True)
    (staged / "adapter_model.safetensors").write_bytes(b"x" * 100)
    (staged / "sub" / "optimizer.pt").write_bytes(b"y" * 10)
    resume.seal(staged, step=step, run=run)
    resume.publish(staged, output_dir / staged.name)
    return output_dir / staged.name


def names(output_dir) -> list[str]:
    return [path.name for path in resume.complete_checkpoints(output_dir)]


def test_published_checkpoints_are_complete_in_the_order_of_their_steps(tmp_path) -> None:
    for step in (100, 20, 9):
        write_checkpoint(tmp_path, step)
    assert names(tmp_path) == ["checkpoint-9", "checkpoint-20", "checkpoint-100"]
    assert not resume.staging_folder(tmp_path).exists()


@pytest.mark.parametrize("damage", ["cut", "lost", "no marker", "torn marker"])
def test_a_damaged_checkpoint_is_not_there(damage, tmp_path) -> None:
    write_checkpoint(tmp_path, 1)
    folder = write_checkpoint(tmp_path, 2)
    if damage == "cut":
        (folder / "adapter_model.safetensors").write_bytes(b"x" * 99)
    elif damage == "lost":
        (folder / "sub" / "optimizer.pt").unlink()
    elif damage == "no marker":
        (folder / resume.MARKER).unlink()
    else:
        (folder / resume.MARKER).write_text('{"step": 2, "fi')
    assert resume.find_checkpoint(tmp_path, True) == tmp_path / "checkpoint-1"
    with pytest.raises(ValueError, match="checkpoint-2: not a complete checkpoint.*here: checkpoint-1"):
        resume.find_checkpoint(tmp_path, str(folder))


def test_foreign_folders_are_passed_over(tmp_path) -> None:
    for name in ("checkpoint-best", "checkpoint-7", "checkpoints"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == []


def test_what_to_resume_from(tmp_path) -> None:
    assert resume.find_checkpoint(tmp_path, False) is None
    assert resume.find_checkpoint(tmp_path, "auto") is None
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        resume.find_checkpoint(tmp_path, True)
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        resume.find_checkpoint(tmp_path, str(tmp_path / "nowhere"))
    folder = write_checkpoint(tmp_path, 5)
    assert {resume.find_checkpoint(tmp_path, wanted) for wanted in (True, "auto", str(folder))} == {folder}


def test_the_same_step_again_replaces_the_folder(tmp_path) -> None:
    write_checkpoint(tmp_path, 5, {"seed": 1})
    folder = write_checkpoint(tmp_path, 5, {"seed": 2})
    assert json.loads((folder / resume.MARKER).read_text())["run"] == {"seed": 2}


def test_another_run_is_refused(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, 5)
    resume.check_same_run(folder, RUN)
    with pytest.raises(ValueError, match="written with seed 42, this run has 43"):
        resume.check_same_run(folder, {**RUN, "seed": 43})


@pytest.mark.parametrize(("keep", "left"), [(None, [1, 2, 3]), (2, [2, 3]), (1, [3])])
def test_rotation_counts_complete_checkpoints_only(keep, left, tmp_path) -> None:
    """A torn folder with a higher number neither counts nor is kept for the last."""
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-4").mkdir()
    resume.rotate(tmp_path, keep)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_a_kill_while_deleting_leaves_nothing_for_good(tmp_path, monkeypatch) -> None:
    """What is half deleted has left its name before, and the next start clears it away."""
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **kwargs: path.exists() and interrupt(path))

    def interrupt(path) -> None:
        next(path.iterdir()).unlink()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resume.rotate(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {".removed-checkpoint-1", "checkpoint-2"}
    monkeypatch.setattr(shutil, "rmtree", real)
    resume.clear_staging(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2"}


def test_a_failed_save_says_what_is_still_there(tmp_path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    error = resume.save_failed(tmp_path / "checkpoint-2", full)
    assert "the disk is full" in str(error) and "no earlier checkpoint exists" in str(error)
    assert "Make room, and continue with resume_from_checkpoint=true" in str(error)
    write_checkpoint(tmp_path, 1)
    error = resume.save_failed(tmp_path / "checkpoint-2", RuntimeError("broken\npipe"))
    assert "broken pipe" in str(error) and "checkpoint-1 is complete" in str(error)
    assert "the disk is full" in str(resume.save_failed(tmp_path / "x", RuntimeError("unexpected pos 64 vs 0")))
    assert isinstance(error, OSError) and "[Errno" not in str(error)


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "Permission denied"), RuntimeError("Writing: nothing came from rank 1")],
)
def test_room_is_asked_for_only_where_it_is_short(error, tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path, 1)
    text = str(resume.save_failed(tmp_path / "checkpoint-2", error))
    assert str(error) in text and "Mend that, and continue" in text
    assert "Make room" not in text and "the disk is full" not in text
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    text = str(resume.save_failed(tmp_path / "checkpoint-2", error))
    assert str(error) in text and "Make room, and continue" in text


def test_a_quota_is_a_full_disk(tmp_path) -> None:
    quota = OSError(errno.EDQUOT, "Disk quota exceeded")
    for error in (quota, RuntimeError(f"rank 0: {quota}")):
        assert "the disk is full" in str(resume.save_failed(tmp_path / "checkpoint-2", error))
