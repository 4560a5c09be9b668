"""A merge-aware run: the adapter computes with its merged weight, from the start step on, and says so in its files."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from halfbyte.checkpoint.detect import read_config
from halfbyte.lora import make_merge_aware, merged_digest, set_merge_aware, start_step
from halfbyte.lora.merge_aware import merge_aware_layers, quantizer_of
from halfbyte.lora.metadata import AdapterMetadata, torch_dtype
from halfbyte.train.config import TrainConfig

KEYS = ("merge_aware", "merge_aware_start_step", "merge_aware_rounding", "merge_aware_scales")


def attach(config: TrainConfig, model: Any, folder: Path) -> Any:
    """Make the adapter on a model merge-aware; the dither's seed is the run's."""
    return make_merge_aware(
        model,
        rounding=config.merge_aware_rounding,
        scales=config.merge_aware_scales or ("keep" if config.merge_aware_rounding == "dither" else "fresh"),
        seed=config.seed,
        dtype=original_dtype(folder),
    )


def original_dtype(folder: Path) -> torch.dtype:
    """The dtype that the base had before it was quantized: what rounding to nearest rounds to first."""
    config = read_config(folder)
    return torch_dtype(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))


def identity(config: TrainConfig) -> dict[str, Any]:
    """What a resumed run must share with the one it continues."""
    return {key: getattr(config, key) for key in KEYS} if config.merge_aware else {}


def described_now(described: AdapterMetadata, model: Any, start: int | float, max_steps: int) -> AdapterMetadata:
    """The adapter's metadata with the digest of its merged weights as they are now; unchanged for a plain adapter.

    start  merge_aware_start_step, of a run of max_steps.
    """
    if not merge_aware_layers(model):
        return described
    return dataclasses.replace(
        described,
        mode="merge-aware",
        quantizer=quantizer_of(model),
        start_step=start_step(start, max_steps),
        merged_digest=merged_digest(model),
    )


class StartStep(TrainerCallback):
    """Plain LoRA before the start step, merge-aware from it on. It looks at the step alone, so a resumed run agrees."""

    def __init__(self, value: int | float) -> None:
        self.value = value

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.switch(state, kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.switch(state, kwargs["model"])

    def switch(self, state: Any, model: Any) -> None:
        """Set every layer for the step that comes."""
        set_merge_aware(model, state.global_step >= start_step(self.value, state.max_steps))
