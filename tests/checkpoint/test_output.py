"""A folder is finished or not there, whatever ends the run: an error, SIGKILL, a full disk, a second run."""

import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halfbyte.checkpoint import output
from halfbyte.checkpoint.output import atomic_folder, write_text


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_success_and_failure(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert listing(tmp_path / "deep") == {"out"} and listing(tmp_path / "deep" / "out") == {"a"}
    with pytest.raises(KeyError), atomic_folder(tmp_path / "other") as folder:
        (folder / "a").write_text("1")
        raise KeyError
    assert listing(tmp_path) == {"deep"}


def test_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_folder(tmp_path / "out") as folder:  # an empty folder may be taken
        (folder / "a").touch()
    with pytest.raises(FileExistsError, match="not an empty folder"), atomic_folder(tmp_path / "out"):
        pass
    assert listing(tmp_path / "out") == {"a"}


def test_a_link_to_an_empty_folder(tmp_path: Path) -> None:
    """The folder behind it is taken; the link stays. A link to nothing, or in a circle, is refused at once."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    with atomic_folder(tmp_path / "out") as folder:
        assert folder.parent == tmp_path / "disk"  # on the file system of the real one, for the rename
        (folder / "a").touch()
    assert (tmp_path / "out").is_symlink() and listing(tmp_path / "disk" / "real") == {"a"}
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("out", "dangling", "circle"):
        with pytest.raises(FileExistsError, match=f"{name}: already there"), atomic_folder(tmp_path / name):
            pass
    assert listing(tmp_path) == {"disk", "out", "dangling", "circle"} and listing(tmp_path / "disk") == {"real"}


def test_a_place_that_no_rename_can_take_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount point (also a bind mount, whose device is its parent's) and the current directory."""
    (tmp_path / "my disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "my disk")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 98:0 /mnt1 {tmp_path}/my\\040disk rw - ext3 /dev/root rw\n")
    monkeypatch.setattr(output, "MOUNTS", mounts)
    for name in ("my disk", "link"):
        with pytest.raises(ValueError, match="my disk: a mount point.* Give a folder below it"):
            atomic_folder(tmp_path / name).__enter__()
    with atomic_folder(tmp_path / "my disk" / "below") as folder:
        (folder / "a").touch()
    mounts.unlink()  # as on a system without it
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: a mount point"):
        atomic_folder(tmp_path / "empty").__enter__()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "empty")
    for path in (".", "../empty", tmp_path / "empty"):
        with pytest.raises(ValueError, match="empty: the current directory.* Give a folder below it"):
            atomic_folder(path).__enter__()
    with atomic_folder("below") as folder:
        (folder / "a").touch()
    assert listing(tmp_path) == {"my disk", "link", "empty"} and listing(tmp_path / "empty") == {"below"}


def test_an_older_folder_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    for text in ("1", "2"):
        with atomic_folder(out, replace=True) as folder:
            (folder / text).touch()
            assert not out.exists() or listing(out) == {"1"}
        assert listing(out) == {text} and listing(tmp_path) == {"out"}
    with pytest.raises(KeyError), atomic_folder(out, replace=True) as folder:
        raise KeyError
    assert listing(out) == {"2"} and listing(tmp_path) == {"out"}
    out.rename(tmp_path / ".out.replaced")  # as a kill between the two renames leaves it
    with pytest.raises(KeyError), atomic_folder(out, replace=True) as folder:
        assert listing(out) == {"2"}
        raise KeyError
    assert listing(out) == {"2"} and listing(tmp_path) == {"out"}


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be written"), atomic_folder(tmp_path / "file" / "out"):
        pass


KILLED = """
    import os, signal, sys
    from halfbyte.checkpoint.output import atomic_folder
    with atomic_folder(sys.argv[1]) as folder:
        (folder / "model.safetensors").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_run_leaves_nothing_finished_and_the_next_starts_clean(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(out)], check=False)
    assert done.returncode == -9 and not out.exists() and listing(tmp_path) == {".out.partial"}
    with atomic_folder(out) as folder:
        assert not any(folder.iterdir())
    assert listing(tmp_path) == {"out"}


def test_two_runs_at_once(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
        with pytest.raises(RuntimeError, match="another run is writing"), atomic_folder(tmp_path / "out"):
            pass
        assert (folder / "a").exists()
    assert listing(tmp_path / "out") == {"a"}


@contextmanager
def full_disk() -> Iterator[None]:
    """A limit on the file size stands in for a full disk: the same system call fails, with EFBIG for ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_full(tmp_path: Path) -> None:
    with (
        full_disk(),
        pytest.raises(OSError, match="disk is full.*Nothing was left behind"),
        atomic_folder(tmp_path / "out") as folder,
    ):
        (folder / "a").write_bytes(b"0" * 2000)
    assert listing(tmp_path) == set()


@pytest.mark.parametrize("append", [False, True])
def test_a_small_file_on_a_full_disk_is_named(tmp_path: Path, append: bool) -> None:
    """Python's own error of a failed write has no name."""
    write_text(tmp_path / "a", "0" * 900)
    with full_disk(), pytest.raises(OSError, match=rf"{tmp_path}/a: cannot be written: the disk is full"):
        write_text(tmp_path / "a", "0" * 2000, append=append)
    write_text(tmp_path / "b", "one")
    write_text(tmp_path / "b", "two", append=True)
    assert (tmp_path / "b").read_text() == "onetwo"
    with pytest.raises(OSError, match="no/a: cannot be written: No such file"):
        write_text(tmp_path / "no" / "a", "")
