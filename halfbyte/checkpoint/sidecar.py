"""The files beside the weights: what a copy of a model carries along, and the record of how halfbyte made it."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.detect import read_json
from halfbyte.checkpoint.shards import INDEX_FILE, safe_path

RECORD_FILE = "halfbyte.json"
CARRIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
NOT_CARRIED = {"config.json", "hf_quant_config.json", "quantize_config.json", INDEX_FILE, RECORD_FILE}
CARRIED_FOLDERS = ("additional_chat_templates",)


def copy_sidecars(source: Path, out: Path) -> None:
    """Copy tokenizer, generation config, chat templates and licence; never weights, code or another format's config.

    A Hub cache links its files; such links are followed, so the copy stands alone. ValueError for a link out of the
    folder: it would put a file of this machine into a model that is passed on.
    """
    for path in sidecars(source):
        target = out / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(safe_path(source, path.relative_to(source).as_posix()), target)


def sidecars(source: Path) -> Iterable[Path]:
    patterns = [*CARRIED, *(f"{name}/*" for name in CARRIED_FOLDERS)]
    found = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name not in NOT_CARRIED and not path.name.endswith(".index.json"))


def write_json(path: Path, content: Any) -> None:
    """Sorted and indented, as transformers writes its configs."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_record(out: Path, **facts: Any) -> None:
    """How the folder came about: version, verb, recipe, seed. For readers, and for merges that follow."""
    from halfbyte import __version__

    write_json(out / RECORD_FILE, {"halfbyte_version": __version__, **facts})


def read_record(folder: Path) -> dict[str, Any]:
    """The record, or an empty dict for a folder that halfbyte did not write."""
    path = folder / RECORD_FILE
    return read_json(path) if path.exists() else {}
