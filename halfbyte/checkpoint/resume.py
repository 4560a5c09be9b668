"""Checkpoints of a run: complete or not there, and continued only by the run they belong to.

A checkpoint is written into a staging folder, sealed with a marker that lists every file with its size, flushed, and
renamed into place. So a run that is killed, or meets a full disk, leaves the last complete checkpoint as it was, and a
copy that was cut short is recognised. Trainer's own way, writing straight into `checkpoint-N` and deleting old ones by
their time, leaves a torn folder that the next start takes for the newest.

The marker also says what the run was fed: the same data in the same order, or a resumed run is another run.
"""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from halfbyte.checkpoint.output import flush

MARKER = "halfbyte_checkpoint.json"
STAGING = ".unfinished"
REMOVED = ".removed-"
PREFIX = "checkpoint-"
ADAPTER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".md")  # not the run's .pt, .pth and .bin
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # how the system, torch and safetensors report a full disk
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_SIGNS = (
    "No space left",
    "quota exceeded",
    "unexpected pos",
)  # of a full disk: in safetensors' error, in torch.save's


def staging_folder(output_dir: Path) -> Path:
    """Where checkpoints of this run are written before they are sealed; on the same file system, for the rename."""
    return output_dir / STAGING


def clear_staging(output_dir: Path) -> None:
    """Remove what a killed run left unfinished, or half deleted."""
    for folder in (staging_folder(output_dir), *output_dir.glob(f"{REMOVED}*")):
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, *, step: int, run: Mapping[str, Any]) -> None:
    """Write the marker of a finished folder, and flush all of it to the disk.

    run   what must be equal for a run to continue from here; JSON values.
    """
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}
    text = json.dumps({"step": step, "run": dict(run), "files": files}, indent=1)
    (folder / MARKER).write_text(text)
    for path in _files(folder):
        flush(path)
    flush(folder)


def publish(staged: Path, final: Path) -> None:
    """Rename a sealed folder into place, over an older one of the same step if there is one."""
    remove(final)
    os.replace(staged, final)
    flush(final.parent)
    with contextlib.suppress(OSError):  # the staging folder, unless something else lies in it
        staged.parent.rmdir()


def remove(folder: Path) -> None:
    """Delete a folder if it is there, renamed first: what is half deleted must not look like a checkpoint.

    The next start clears away what a kill leaves of it.
    """
    aside = folder.with_name(REMOVED + folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
        shutil.rmtree(aside)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a complete checkpoint; None when there is none, or a listed file is missing or of another size."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return marker if whole else None


def complete_checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [path for path in output_dir.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(filter(read_marker, folders), key=lambda path: int(path.name.removeprefix(PREFIX)))


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that a complete checkpoint has taken."""
    marker = read_marker(checkpoint)
    assert marker is not None, checkpoint
    return marker["step"]


def copy_adapter(checkpoint: Path, folder: Path) -> None:
    """Copy the adapter and the tokenizer of a checkpoint, without the states that only a run needs."""
    for path in checkpoint.iterdir():
        if path.is_file() and path.suffix in ADAPTER_SUFFIXES and path.name not in (MARKER, "trainer_state.json"):
            shutil.copyfile(path, folder / path.name)


def find_checkpoint(output_dir: Path, wanted: bool | str) -> Path | None:
    """The checkpoint to resume from, or None to start anew.

    wanted   False; True for the newest complete one; "auto" for the newest, if there is any; or a folder.
    raises   FileNotFoundError when there is none, ValueError for a folder that is not complete.
    """
    if wanted is False:
        return None
    if wanted is True or wanted == "auto":
        found = complete_checkpoints(output_dir)
        if not found and wanted is True:
            raise FileNotFoundError(
                f"{output_dir}: holds no complete checkpoint to resume from; start anew without resume_from_checkpoint"
            )
        return found[-1] if found else None
    folder = Path(wanted)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint folder; check resume_from_checkpoint")
    if read_marker(folder) is None:
        others = ", ".join(path.name for path in complete_checkpoints(folder.parent)) or "none"
        raise ValueError(
            f"{folder}: not a complete checkpoint of halfbyte (no {MARKER}, or files differ from what it lists); "
            f"choose a complete one, here: {others}"
        )
    return folder


def check_same_run(checkpoint: Path, run: Mapping[str, Any]) -> None:
    """ValueError naming the first thing in which this run differs from the one that wrote the checkpoint."""
    marker = read_marker(checkpoint)
    assert marker is not None, checkpoint
    for key in [*run, *(key for key in marker["run"] if key not in run)]:
        recorded, value = (found.get(key, "unset") for found in (marker["run"], run))
        if recorded != value:
            raise ValueError(
                f"{checkpoint}: was written with {key} {recorded}, this run has {value}, so it would not be continued; "
                "restore it, or start anew in another output_dir"
            )


def rotate(output_dir: Path, keep: int | None) -> None:
    """Delete the oldest complete checkpoints beyond `keep`; the newest always stays."""
    if keep is not None:
        for folder in complete_checkpoints(output_dir)[: -max(1, keep)]:
            remove(folder)


def save_failed(final: Path, error: BaseException) -> OSError:
    """What to tell the user when a checkpoint could not be written, whichever library noticed it.

    Room is asked for when the system or a library said that the disk is full, or when less is free than the last
    complete checkpoint takes.
    """
    output_dir = final.parent
    free = shutil.disk_usage(output_dir).free
    kept = complete_checkpoints(output_dir)
    state = f"{kept[-1].name} is complete" if kept else "no earlier checkpoint exists"
    text = " ".join(str(error).split())
    code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    full = code in DISK_FULL or any(sign in text for sign in FULL_SIGNS)
    needed = sum(path.stat().st_size for path in _files(kept[-1])) if kept else 0
    cause = "the disk is full" if full else text[:400]
    remedy = "Make room" if full or free < needed else "Mend that"
    return SaveError(
        code,
        f"{final}: could not be saved: {cause} ({free / 1e9:.2f} GB free); {state}, and nothing half-written is taken "
        f"for one. {remedy}, and continue with resume_from_checkpoint=true",
    )


class SaveError(OSError):
    """A checkpoint that could not be written; reads as its message alone."""

    def __str__(self) -> str:
        return str(self.strerror)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
