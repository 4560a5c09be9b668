"""What a run's folder says, read without trusting it: files may be missing, cut short, of other versions, or hostile.

Nothing here raises for a file's contents. What cannot be read is left out, and named in `notes`; the report shows them.
"""

import json
import math
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from halfbyte.checkpoint.resume import PREFIX, read_marker
from halfbyte.train.files import ADAPTER, BASE, CONFIG, MEMORY, METRICS, SAMPLES, VERSIONS, read_lines, read_metrics

RECORD = "halfbyte.json"
KNOWN = (METRICS, CONFIG, VERSIONS, ADAPTER)
REPORTS = (REPORT, COMPARED) = ("report.html", "compared.html")  # ours, whatever else is there
Points = list[tuple[float, float]]
MOST_PARTS = 2000  # of one value of the configuration


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint-N`: complete when its marker lists what is there."""

    name: str
    step: int
    size_bytes: int
    complete: bool


@dataclass
class Run:
    """One run, as far as its files tell.

    rows     lines of metrics.jsonl.
    memory   bytes by kind; errors: layer -> relative error of its quantization; kept: layer -> figures of a merge.
    """

    folder: Path
    name: str
    rows: list[dict[str, Any]]
    config: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    merge: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def series(self, key: str) -> Points:
        """(step, value) of a metric, in the order of the file; what is no finite number is left out."""
        pairs = ((finite(row.get("step")), finite(row.get(key))) for row in self.rows)
        return [(step, value) for step, value in pairs if step is not None and value is not None]

    @property
    def finished(self) -> bool:
        """Whether the last thing it wrote is the line with which a run ends."""
        return bool(self.rows) and "train_runtime" in self.rows[-1]

    def kept(self) -> dict[str, float]:
        """Layer -> share of the adapter's change that a merge kept."""
        layers = self.merge.get("layers")
        shares = {name: finite(part.get("kept")) for name, part in mapping(layers).items() if isinstance(part, dict)}
        return {name: share for name, share in shares.items() if share is not None}


def read_run(folder: Path, merged: Path | None = None) -> Run:
    """A run, and the record of a model merged from it.

    raises  FileNotFoundError for no folder, or a merged one without a record; ValueError for a folder of another kind.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give the output_dir of `halfbyte train`")
    others = [entry for entry in folder.iterdir() if entry.name not in REPORTS and not entry.name.startswith(".")]
    if others and not any((folder / name).exists() for name in KNOWN):
        raise ValueError(
            f"{folder}: holds no run (none of {', '.join(KNOWN)}); give the output_dir of `halfbyte train`"
        )
    run = Run(folder, folder.resolve().name or str(folder), read_metrics(folder / METRICS))
    run.config = flat(read_yaml(folder / CONFIG, run.notes))
    run.versions = flat(read_json(folder / VERSIONS, run.notes))
    run.memory = numbers(read_json(folder / MEMORY, run.notes))
    run.errors = numbers(mapping(read_json(folder / BASE, run.notes).get("errors")))
    run.samples = [row for row in read_lines(folder / SAMPLES) if {"step", "prompt", "answer"} <= row.keys()]
    run.checkpoints = read_checkpoints(folder)
    if merged is not None:
        run.merge = read_merge(merged, run.notes)
    return run


def read_merge(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The record that `halfbyte merge` left beside the merged weights."""
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(f"{folder}: no {RECORD}; give the folder that `halfbyte merge` wrote")
    record = read_json(folder / RECORD, notes)
    if record and not mapping(record.get("layers")):
        notes.append(f"{folder}: the merge recorded no layers; merge again with this version")
    return record


def read_checkpoints(folder: Path) -> list[Checkpoint]:
    """By step; a torn one is listed as what it is."""
    found = []
    for path in folder.glob(f"{PREFIX}*"):
        step = path.name.removeprefix(PREFIX)
        if path.is_dir() and step.isdecimal():
            size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
            found.append(Checkpoint(path.name, int(step), size, read_marker(path) is not None))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """A file's object, or an empty one with a note."""
    if not path.exists():
        return {}
    try:
        return mapping(json.loads(path.read_text("utf-8", "replace")), path, notes)
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read ({type(error).__name__})")
        return {}


def read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    """A file's mapping, or an empty one with a note."""
    if not path.exists():
        return {}
    try:
        return mapping(yaml.safe_load(path.read_text("utf-8", "replace")), path, notes)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} could not be read ({type(error).__name__})")
        return {}


def mapping(value: Any, path: Path | None = None, notes: list[str] | None = None) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    if path is not None and notes is not None:
        notes.append(f"{path.name} holds {type(value).__name__}, expected a mapping")
    return {}


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among a mapping's values."""
    found = {key: finite(value) for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}


def finite(value: Any) -> float | None:
    """A number that can be drawn, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond floats
        return None


def flat(values: dict[str, Any]) -> dict[str, str]:
    """Key -> value as one line of text."""
    return {key: value if isinstance(value, str) else line(value) for key, value in values.items()}


def cut_short(value: Any) -> str:
    """Its first parts, three levels deep."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxstring = 3, 20, 20, 200
    return short.repr(value)


def line(value: Any) -> str:
    """A value as JSON; cut short where YAML's aliases make it endless, or so large that nobody would read it."""
    waiting, seen = [value], 0
    while waiting:
        item = waiting.pop()
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple | set) else ()
        seen += 1
        if seen + len(waiting) > MOST_PARTS:
            return cut_short(value)
    try:
        return json.dumps(value, default=str)
    except TypeError:  # a key that JSON does not know
        return cut_short(value)
