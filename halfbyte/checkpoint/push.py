"""An adapter or a model to the Hugging Face Hub: weights, configs, tokenizer and a model card, in one commit.

One commit, so that nobody ever downloads half of it. Only what belongs to a model is sent: optimizer states, logs and
reports that may lie in the same folder stay at home.
"""

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.checkpoint.card import model_card
from halfbyte.checkpoint.hub import FILES, HUB_ID, reason, switched_off

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SENT = (*FILES, "LICENSE*", "NOTICE*", "*.tiktoken")
KEPT = ("trainer_state.json", "halfbyte_checkpoint.json")  # of a checkpoint: the run's, not the adapter's


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    card: str | os.PathLike[str] | None = None,
    base_model: str | None = None,
    message: str | None = None,
    api: "HfApi | None" = None,
) -> str:
    """Send an adapter's or a model's folder; returns the commit's address.

    card        a Markdown file to use as the card, instead of one made from the folder's own records.
    base_model  the base's Hub id, for the card; default: what the folder says, if that is a Hub id.
    api         the client; default: huggingface_hub's, with the machine's own token.
    raises      FileNotFoundError, ValueError for what is no model or no id, before anything is sent;
                RuntimeError when the Hub cannot be reached or refuses.
    """
    folder = Path(folder)
    found = HUB_ID.fullmatch(repo_id)
    if not found or found[2]:
        raise ValueError(f"{repo_id!r} is no name on the Hub, expected owner/name. Give it as such.")
    paths = files_to_send(folder)
    text = Path(card).read_text() if card is not None else model_card(folder, base_model)
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), str(path)) for path in paths]
    operations.append(CommitOperationAdd("README.md", text.encode()))
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        title = message or f"{'Adapter' if is_adapter(folder) else 'Model'} made by halfbyte"
        return str(api.create_commit(repo_id, operations, commit_message=title).commit_url)
    except Exception as error:  # the client raises a dozen kinds
        raise RuntimeError(f"{folder} could not be sent to {repo_id}: {why(error)}") from error


def files_to_send(folder: Path) -> list[Path]:
    """Weights, configs, tokenizer, licence. FileNotFoundError or ValueError for a folder that is no model."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; give an adapter's or a model's")
    if not is_adapter(folder) and not (folder / "config.json").is_file():
        inside = " Give its folder `adapter`." if (folder / "adapter").is_dir() else " Give the folder of one."
        raise ValueError(f"{folder}: neither an adapter (adapter_config.json) nor a model (config.json).{inside}")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not hidden(path.relative_to(folder))]
    paths = [p for p in paths if p.name not in KEPT and any(fnmatch(p.name, pattern) for pattern in SENT)]
    if not any(path.suffix == ".safetensors" for path in paths):
        raise ValueError(f"{folder}: holds no weights (.safetensors); give a folder that does")
    return paths


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def why(error: Exception) -> str:
    """What hinders, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    if switched_off():
        return "the Hub is switched off (HF_HUB_OFFLINE=1). Unset it, and push again."
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return f"it wants to know who you are ({reason(error)}). Log in with `hf auth login`, or set HF_TOKEN."
    if status == 403:
        return f"this account may not write there ({reason(error)}). Use a token that may write, or another owner."
    return f"{reason(error)}. Nothing is half there; check the network, and push again."
