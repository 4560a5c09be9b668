"""A folder that is either finished or not there.

Everything is written into a hidden sibling, `.NAME.partial`, flushed to disk and renamed at the end: a run that is
killed leaves nothing that looks finished, and the next one removes its remains and starts clean. A lock keeps two live
runs apart. (A rename inside one file system is atomic; writing in place and marking the end with a file is not, for
every reader would have to know of the mark.)
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `path` when the block ends without an error, else it is removed.

    raises  FileExistsError when `path` exists and is not an empty folder; OSError when it cannot be written, or the
            disk is full; RuntimeError when another run is writing it now.
    """
    out = Path(path).absolute()
    check_free(out)
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise OSError(
            error.errno, f"{out}: cannot be written here ({error.strerror}). Choose another folder."
        ) from error
    try:
        _lock(lock, out)
        _empty(partial)
        yield partial
        _sync(partial)
        os.replace(partial, out)
        flush(out.parent)
    except BaseException as error:
        if not isinstance(error, AlreadyWriting):
            shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            free = shutil.disk_usage(out.parent).free / 1e9
            remedy = "Nothing was left behind; make room and run again."
            raise _os_error(error, f"{out}: the disk is full ({free:.2f} GB free). {remedy}") from error
        raise
    finally:
        os.close(lock)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder for the block; it leaves no file, and ends with the process.

    raises  RuntimeError when another live run holds it.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        _lock(fd, folder)
        yield
    finally:
        os.close(fd)


def write_text(path: Path, text: str, *, append: bool = False) -> None:
    """Write a small file, or append to it. An OSError names it, which Python's own, of a full disk, does not."""
    try:
        with path.open("a" if append else "w") as file:
            file.write(text)
    except OSError as error:
        why = error.strerror
        if error.errno in DISK_FULL:
            why = f"the disk is full ({shutil.disk_usage(path.parent).free / 1e9:.2f} GB free)"
        raise _os_error(error, f"{path}: cannot be written: {why}. Make room, or choose another folder.") from error


def check_free(out: Path) -> None:
    """FileExistsError unless `out` is absent or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise FileExistsError(
            f"{out}: already there and not an empty folder. Choose another folder, or remove it first."
        )


class AlreadyWriting(RuntimeError):
    """Another live process holds the lock of the same output."""


def _os_error(cause: OSError, message: str) -> OSError:
    """An OSError with the cause's errno and kind, whose text is the message alone."""
    error = type(cause)(message)
    error.errno = cause.errno
    return error


def _lock(fd: int, out: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AlreadyWriting(
            f"{out}: another run is writing this folder now. Wait for it, or choose another."
        ) from error


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which files a folder has."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
