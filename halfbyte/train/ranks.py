"""Every rank of a launch is told the same run, or none of them trains.

A launch that mixes two configs goes wrong late, or never visibly: with another learning_rate or lora_alpha each rank
steps its own copy of the adapter, and rank 0's is saved; with another max_steps or save_steps one rank waits for
another in a checkpoint that the other does not write, until a timeout. So the whole config is compared before anything
is read, and what the ranks then found in their files, the data and the checkpoint, before the base is loaded.
Rejected: rank 0 sends its config to the others; who gave two configs would not learn which of them ran.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoint import resume
from halfbyte.parallel.agree import agree
from halfbyte.train.config import TrainConfig

MAY_DIFFER = ("base_model",)  # hosts may keep their copies of the base at different places
UNSET = "unset"


def check_same_config(config: TrainConfig, *, timeout: float) -> None:
    """ValueError on all ranks, naming keys and values, when one was given another config than rank 0."""
    told = config.model_dump(mode="json", exclude=set(MAY_DIFFER))
    check_same("Comparing the configs", flat(told), "give every rank the same config", timeout)


def check_same_run(run: Mapping[str, Any], checkpoint: Path | None, *, timeout: float) -> None:
    """ValueError on all ranks, when one has read other data than rank 0, or found another checkpoint to resume from."""
    taken = 0 if checkpoint is None else resume.step_of(checkpoint)
    remedy = "give every rank the same data, and the same checkpoint where it resumes"
    check_same("Comparing the runs", {**run, "steps already taken": taken}, remedy, timeout)


def check_same(label: str, values: Mapping[str, Any], remedy: str, timeout: float) -> None:
    """ValueError on all ranks, when a rank's values are not those of rank 0; the first such rank is named."""
    first, *others = agree(label, dict(values), timeout=timeout)
    for number, other in enumerate(others, start=1):
        keys = [key for key in {**first, **other} if first.get(key, UNSET) != other.get(key, UNSET)]
        if keys:
            its = " and ".join(f"{key} {other.get(key, UNSET)}" for key in keys)
            expected = " and ".join(str(first.get(key, UNSET)) for key in keys)
            raise ValueError(f"rank {number} has {its}, rank 0 has {expected}; {remedy}")


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping of dotted keys, as an override writes them: datasets.0.path."""
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)  # type: ignore[assignment]
    else:
        return {key: value}
    return {k: v for name, item in items for k, v in flat(item, f"{key}.{name}".lstrip(".")).items()}
