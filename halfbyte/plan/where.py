"""Where the config to plan from lies. Of a Hub id only config.json is fetched: a plan comes before the download."""

from pathlib import Path

from halfbyte.checkpoint.detect import CONFIG_FILE
from halfbyte.checkpoint.hub import HUB_ID, asking, local_folder


def config_place(path: str) -> Path:
    """A folder, or a config file by itself.

    raises  FileNotFoundError for what is neither there nor a Hub id, or cannot be fetched.
    """
    found = HUB_ID.fullmatch(path)
    if Path(path).exists() or not found:
        return local_folder(path)
    from huggingface_hub import hf_hub_download

    with asking(path, f"its {CONFIG_FILE}", f"a local {CONFIG_FILE}"):
        return Path(hf_hub_download(found[1], CONFIG_FILE, revision=found[2])).parent
