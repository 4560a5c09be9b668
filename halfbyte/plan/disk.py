"""Disk: what a run leaves, in bytes."""

from dataclasses import dataclass

from halfbyte.plan.optimizer import rule_of
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape


@dataclass(frozen=True)
class Disk:
    """base       the NVFP4 folder: packed weights, everything else in bf16.
    adapter       factors in fp32, as PEFT saves them.
    checkpoint    adapter and optimizer states; a new one is written before an old one is deleted.
    merged        merged back to NVFP4 (as the base), or to bf16.
    """

    base: float
    adapter: float
    checkpoint: float
    merged_bf16: float


def plan_disk(shape: ModelShape, s: Settings) -> Disk:
    adapter = 4 * shape.adapter_params + s.width * shape.saved_params
    states = rule_of(s.optimizer).disk * shape.trainable_params
    return Disk(shape.base_bytes(2), adapter, adapter + states, 2 * shape.params)
