"""`write_report`: a run's page as a file that is whole at every moment. `watch`: the same while it goes on."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from halfbyte.report.page import page
from halfbyte.report.read import COMPARED, REPORT, REPORTS, Run, read_run


def write_report(
    run: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    merged: Sequence[str | os.PathLike[str]] = (),
    reload_s: int | None = None,
) -> tuple[Path, list[Run]]:
    """Write the page of one run, or of two laid over each other; returns where, and what was read.

    out       default: report.html in the run's folder, compared.html there for two.
    merged    folders that `halfbyte merge` wrote from the runs' adapters, in the runs' order.
    reload_s  the page loads itself anew until the runs have ended.
    raises    FileNotFoundError or ValueError for a folder that is none; OSError when the file cannot be written.
    """
    folders = [Path(run), *([Path(other)] if other is not None else [])]
    if len(merged) > len(folders):
        raise ValueError(f"merged names {len(merged)} folders for {len(folders)} runs; give at most one for each")
    models: list[Path | None] = [Path(folder) for folder in merged]
    models += [None] * (len(folders) - len(models))
    runs = [read_run(folder, model) for folder, model in zip(folders, models, strict=True)]
    if len(runs) == 2 and runs[0].name == runs[1].name:
        for each in runs:
            each.name = str(each.folder)
    path = Path(out) if out is not None else folders[0] / (REPORT if len(runs) == 1 else COMPARED)
    goes_on = not all(each.finished for each in runs)
    replace_text(path, page(runs, reload_s=reload_s if goes_on else None))
    return path, runs


def replace_text(path: Path, text: str) -> None:
    """Write beside it and rename, so that a browser never loads half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, "utf-8")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def watch(
    write: Callable[[], tuple[Path, list[Run]]], every_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write anew whenever a run's files have changed, until all runs have ended."""
    path, runs = write()
    seen = None
    while not all(run.finished for run in runs):
        sleep(every_s)
        now = [last_change(run.folder, path) for run in runs]
        if now != seen:
            seen = now
            path, runs = write()


def last_change(folder: Path, report: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of what lies in a run's folder, the report itself aside."""
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.name not in (*REPORTS, report.name) and not entry.name.startswith("."):
            try:
                stat = entry.stat()
            except OSError:  # renamed meanwhile
                continue
            found.append((entry.name, stat.st_size, stat.st_mtime_ns))
    return found
