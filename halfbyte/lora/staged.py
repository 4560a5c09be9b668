"""New versions of a folder's files, all of them or none: an adapter's weights and config belong together.

They are written into a hidden folder inside (so on its file system), flushed, and renamed one by one, `last` first
taken away and then put back at the end. A kill before that leaves the old files; a kill among the renames leaves a
folder without `last`, which nobody takes for whole. A rename of the whole folder would be one step, but it would
take what else its owner keeps there. The next call removes what killed ones left.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PREFIX = ".unfinished-"


@contextmanager
def staged_files(folder: str | os.PathLike[str], *, last: str) -> Iterator[Path]:
    """Yields a folder to fill; when the block ends without an error, its files lie in `folder`, over older ones.

    last    name of the files without which the others mean nothing.
    raises  OSError, in one sentence, when they cannot be written; `folder` is then as it was.
    """
    out = Path(folder)
    there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        partial, lock = new_partial(out)
    except OSError as error:
        raise unwritten(out, error) from error
    try:
        yield partial
        flush_all(partial)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not there and not any(out.iterdir()):
            out.rmdir()
        if isinstance(error, (OSError, SafetensorError)):  # how the system and safetensors report a full disk
            raise unwritten(out, error) from error
        raise
    else:
        put_in_place(partial, out, last)
        shutil.rmtree(partial)
    finally:
        os.close(lock)


def new_partial(out: Path) -> tuple[Path, int]:
    """A new hidden folder in `out` and its lock, which ends with the process; those of dead ones are removed."""
    for left in out.glob(f"{PREFIX}*"):
        try:
            lock = os.open(left, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # its process lives
            pass
        finally:
            os.close(lock)
    while True:
        partial = Path(tempfile.mkdtemp(prefix=PREFIX, dir=out))
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():  # else another process took it for a dead one's before it was locked
            return partial, lock
        os.close(lock)


def put_in_place(partial: Path, out: Path, last: str) -> None:
    """Rename the files of `partial` to their places in `out`, with no file named `last` there in the meantime."""
    names = [path.relative_to(partial) for path in sorted(partial.rglob("*")) if path.is_file()]
    folders = {out / name.parent for name in names}
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name.name == last:
            (out / name).unlink(missing_ok=True)
    for folder in folders:
        flush(folder)
    for group in ([name for name in names if name.name != last], [name for name in names if name.name == last]):
        for name in group:
            os.replace(partial / name, out / name)
        for folder in folders:
            flush(folder)


def flush_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        flush(path)


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which files a folder has."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unwritten(out: Path, error: BaseException) -> OSError:
    """An OSError that says all in its text."""
    cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
    kind = type(error) if isinstance(error, OSError) else OSError
    said = kind(
        f"{out}: could not be saved ({cause}). What was there is as it was. Make room, or choose another folder."
    )
    said.errno = getattr(error, "errno", None)
    return said
