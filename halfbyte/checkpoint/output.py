"""A folder that is either finished or not there.

Everything is written into a hidden sibling, `.NAME.partial`, flushed to disk and renamed at the end: a run that is
killed leaves nothing that looks finished, and the next one removes its remains and starts clean. A lock keeps two live
runs apart. (A rename inside one file system is atomic; writing in place and marking the end with a file is not, for
every reader would have to know of the mark.)
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yields a folder to fill; it becomes `path` when the block ends without an error, else it is removed.

    path     absent, an empty folder, or a link to one, which then stays a link.
    replace  True: an older folder may be there; it stays as it is until the new one is complete, and then gives way.
    raises   FileExistsError when `path` exists and is not an empty folder; ValueError when it is one that no rename can
             put another in the place of; OSError when it cannot be written, or the disk is full; RuntimeError when
             another run is writing it now.
    """
    if not replace:
        check_free(Path(path).absolute())
    out = Path(path).resolve()  # of a link, the folder that the finished one takes the place of
    if not replace:
        check_place(out)
    partial, aside = out.parent / f".{out.name}.partial", out.parent / f".{out.name}.replaced"
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
        if replace and aside.exists() and not out.exists():  # a run was killed between the two renames
            os.replace(aside, out)
        yield partial
        _sync(partial)
        if replace and out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(out, aside)
        os.replace(partial, out)
        flush(out.parent)
        if replace:
            shutil.rmtree(aside, ignore_errors=True)
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


def check_place(out: Path) -> None:
    """ValueError for an existing folder that the finished one cannot replace by a rename, or should not."""
    if is_mount_point(out):
        raise ValueError(f"{out}: a mount point, which no finished folder can be renamed to. Give a folder below it.")
    with contextlib.suppress(FileNotFoundError):  # of a working directory that was deleted
        if out == Path.cwd():
            raise ValueError(
                f"{out}: the current directory; a finished folder takes the place of the output, and you would stay in "
                "one that is gone. Give a folder below it."
            )


def is_mount_point(folder: Path) -> bool:
    """Also of a bind mount inside one file system, which `os.path.ismount` takes for an ordinary folder."""
    try:
        mounts = MOUNTS.read_bytes().splitlines()
    except OSError:  # not Linux
        return os.path.ismount(folder)
    places = {re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in mounts}
    return os.fsencode(folder) in places or os.path.ismount(folder)


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
