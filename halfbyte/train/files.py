"""The files of a run's folder: their names, and a reader of the two that are written line by line.

It imports nothing, so that what only looks at a run (halfbyte/report) opens without transformers.
"""

import json
from pathlib import Path
from typing import Any

ADAPTER = "adapter"
CONFIG = "config.yaml"
VERSIONS = "versions.json"
METRICS = "metrics.jsonl"
PLOT = "loss.png"
MEMORY = "memory.json"
BASE = "base.json"
SAMPLES = "samples.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a line cut short by a kill is left out, and no file is no rows."""
    return [row for row in read_lines(path) if "step" in row]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file with one on each line; other lines are left out."""
    rows = []
    for line in path.read_text("utf-8", "replace").split("\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
