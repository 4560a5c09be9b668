"""A model given as a local folder or file, or as a Hub id: `owner/name`, or `owner/name@revision` to hold on to one."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The folder (or file) itself, or the snapshot of a Hub id, downloaded when the machine is online.

    raises  FileNotFoundError for what is neither there nor a Hub id, or cannot be fetched.
    """
    text = os.fspath(path)
    if Path(text).exists():
        return Path(text)
    found = HUB_ID.fullmatch(text)
    if not found:
        raise FileNotFoundError(
            f"{text}: no such file or folder, and not a Hub id of the form owner/name. Check the spelling."
        )
    from huggingface_hub import snapshot_download

    with asking(text, "a model of that name", "a local folder"):
        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=FILES))


@contextmanager
def asking(name: str, wanted: str, instead: str) -> Iterator[None]:
    """FileNotFoundError, with what to do, when the Hub's client fails: it raises a dozen kinds, and all mean that what
    is wanted is not here."""
    try:
        yield
    except Exception as error:
        if switched_off():
            raise FileNotFoundError(
                f"{name}: no such folder here, no copy in the Hub's cache, and the Hub is switched off "
                f"(HF_HUB_OFFLINE=1). Unset it to download, or give {instead}."
            ) from error
        raise FileNotFoundError(
            f"{name}: no such folder here, and the Hub could not be asked for {wanted} ({reason(error)}). "
            f"Check the name, go online, or give {instead}."
        ) from error


def switched_off() -> bool:
    """Whether the Hub's client was told to stay offline."""
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


def reason(error: Exception) -> str:
    """The first line of what the client says, shortened."""
    return str(error).strip().split("\n")[0][:200]
