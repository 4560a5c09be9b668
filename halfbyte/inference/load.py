"""A model to try: a folder, NVFP4 or dense, alone or with an adapter, checked and ready to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.hub import local_folder
from halfbyte.checkpoint.load import load_dense_model, load_model
from halfbyte.lora import fuse, load_adapter
from halfbyte.lora.metadata import CONFIG_NAME
from halfbyte.train.preflight import load_tokenizer


@dataclass(frozen=True)
class Runnable:
    """A model in eval mode, its tokenizer, and what to call it. with_adapter: `model` is a PeftModel."""

    name: str
    model: Any
    tokenizer: Any
    with_adapter: bool = False


def load_runnable(path: str, adapter: str | None = None, *, any_base: bool = False, device: str = "auto") -> Runnable:
    """Load a model, and an adapter on it, as they were trained.

    path      a folder or a Hub id: NVFP4, dense, or merged.
    adapter   a PEFT adapter's folder; a merge-aware one computes with its merged weights.
    any_base  take the adapter although it was trained on another base.
    device    auto, cpu or cuda. bf16 on a GPU, fp32 on a CPU, where bf16 is slow.
    raises    FileNotFoundError, ValueError: no such folder, no tokenizer, an adapter of another base.
    """
    where = pick_device(device)
    folder = local_folder(path)
    if is_adapter(folder):
        raise ValueError(f"{path}: found an adapter, expected a model; give its base, and this as the adapter")
    attached = adapter_folder(adapter) if adapter is not None else None
    tokenizer = load_tokenizer(folder)
    load = load_model if detect(folder, read_config(folder)) is not None else load_dense_model
    model: Any = load(folder, dtype=torch.bfloat16 if where == "cuda" else torch.float32, device=where)
    if attached is not None:
        model = fuse(load_adapter(model, attached, any_base=any_base))
    return Runnable(adapter or path, model.eval(), tokenizer, attached is not None)


def pick_device(name: str) -> str:
    """ "cuda" or "cpu"; ValueError for cuda on a machine without it."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {name!r}, expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device here; use cpu or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (folder / CONFIG_NAME).exists()


def adapter_folder(path: str) -> Path:
    """An adapter's folder. FileNotFoundError for none, with what else was found there."""
    folder = local_folder(path)
    if not is_adapter(folder):
        model = (folder / "config.json").exists()
        found = "a model" if model else "no adapter_config.json"
        do = "give it with --compare, or as the base" if model else "give the folder that training left (RUN/adapter)"
        raise FileNotFoundError(f"{path}: found {found}, expected a PEFT adapter; {do}")
    return folder
