"""A model given as a local folder or file, or as a Hub id."""

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder (or file) itself, or the snapshot of a Hub id, downloaded when the machine is online.

    raises  FileNotFoundError for what is neither there nor a Hub id, or cannot be fetched.
    """
    text = os.fspath(path)
    if Path(text).exists():
        return Path(text)
    if not HUB_ID.fullmatch(text):
        raise FileNotFoundError(f"{text}: no such file or folder, and not a Hub id of the form owner/name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=FILES))
    except Exception as error:  # the client raises a dozen kinds; all mean that the model is not here
        reason = str(error).strip().split("\n")[0][:200]
        raise FileNotFoundError(
            f"{text}: no such folder here, and the Hub could not be asked for a model of that name ({reason}). "
            "Check the name, go online, or give a local folder."
        ) from error
