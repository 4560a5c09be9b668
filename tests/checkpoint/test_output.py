"""A folder is finished or not there, whatever ends the run: an error, SIGKILL, a full disk, a second run."""

import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
