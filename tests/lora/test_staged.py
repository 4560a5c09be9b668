"""A saved adapter is the old one, the new one or none, whatever ends the process; never one without its key."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.lora import make_merge_aware
from halfbyte.lora import metadata as md
from halfbyte.lora.adapter_files import describe_adapter, load_adapter, save_adapter, write_adapter
from halfbyte.lora.staged import PREFIX, staged_files
from tests.lora.models import fill, nvfp4_mlp, with_lora

STEPS = ("replace", "unlink", "fsync", "mkdir")  # of the os module: what changes a folder, or waits for the disk


def aware(size: float) -> Any:
    model = make_merge_aware(with_lora(nvfp4_mlp()), seed=7)
    fill(model, size)
    return model


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def counting(count: int, then: Callable[[], None]) -> tuple[dict[str, Any], list[int]]:
    """Stand-ins for the calls in STEPS; before call number `count` of all of them, `then` is called."""
    calls, real = [0], {name: getattr(os, name) for name in STEPS}

    def stand_in(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                then()
            return real[name](*args, **kwargs)

        return call

    return {name: stand_in(name) for name in STEPS}, calls


def killed_at(count: int, save: Callable[[], None]) -> bool:
    """Run `save` in a child that is killed before its call number `count`; False when it ended before."""
    pid = os.fork()
    if pid == 0:
        for name, call in counting(count, lambda: os.kill(os.getpid(), signal.SIGKILL))[0].items():
            setattr(os, name, call)
        save()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("older", [True, False])
def test_killed_anywhere_it_is_the_old_one_the_new_one_or_none(tmp_path: Path, older: bool) -> None:
    old, new = aware(0.05), aware(0.2)
    save_adapter(old, tmp_path / "old")
    save_adapter(new, tmp_path / "new")
    expected = {weights(tmp_path / name): md.read(tmp_path / name).merged_digest for name in ("old", "new")}
    described, seen = describe_adapter(new), []
    for count in range(1, 100):
        folder = tmp_path / f"killed {count}"
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
        if older:
            write_adapter(old, folder, describe_adapter(old))
        killed = killed_at(count, lambda folder=folder: write_adapter(new, folder, described))
        if (folder / md.CONFIG_NAME).exists():
            recorded = md.read(folder)
            assert recorded is not None and recorded.mode == "merge-aware" and recorded.quantizer.seed == 7, count
            assert recorded.merged_digest == expected[weights(folder)], count
            seen.append(recorded.merged_digest == described.merged_digest)
        else:
            with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
                load_adapter(nvfp4_mlp(), folder)
        assert (folder / "notes.txt").read_text() == "mine"
        write_adapter(new, folder, described)
        assert not list(folder.glob(f"{PREFIX}*")) and weights(folder) == weights(tmp_path / "new")
        if not killed:
            break
    assert not killed and count > 8
    assert seen == sorted(seen) and seen[-1] and (not older or seen.count(False) >= 4)


def test_a_failure_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = aware(0.05), aware(0.2)
    save_adapter(old, tmp_path / "a")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # stands in for a full disk: EFBIG for ENOSPC
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        for name in ("a", "absent"):
            with pytest.raises(OSError, match=rf"{name}: could not be saved .*What was there is as it was"):
                save_adapter(new, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(md, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_adapter(new, tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file: could not be saved"):
        save_adapter(new, tmp_path / "file")


def test_what_else_lies_in_the_folder_stays(tmp_path: Path) -> None:
    """The user's files, a card that was edited, a second adapter; also where the folder is a link."""
    folder = tmp_path / "a"
    model = with_lora(nvfp4_mlp())
    save_adapter(model, folder)
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n# Mine\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "one.txt").write_text("1")
    (tmp_path / "link").symlink_to(folder)
    fill(model, 0.3)
    save_adapter(model, tmp_path / "link")
    assert "# Mine" in (folder / "README.md").read_text() and (folder / "notes" / "one.txt").read_text() == "1"
    assert (tmp_path / "link").is_symlink() and not list(folder.glob(f"{PREFIX}*"))
    saved = load_file(folder / "adapter_model.safetensors")["base_model.model.up.lora_B.weight"]
    assert torch.equal(saved, model.base_model.model.up.lora_B["default"].weight)


def test_a_live_ones_folder_is_left_alone(tmp_path: Path) -> None:
    with staged_files(tmp_path / "a", last="z") as first:
        (first / "x").write_text("1")
        with staged_files(tmp_path / "a", last="z") as second:
            (second / "y").write_text("2")
        assert (first / "x").exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["x", "y"]
