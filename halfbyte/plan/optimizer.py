"""Optimizer states: bytes a trainable value, in memory, on disk, and what a step needs on top."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Of one optimizer, in bytes a trainable fp32 value.

    state    both moments in memory.
    disk     both moments in a checkpoint (docs/optimizers.md: scales are repeated for every 64 values).
    step_gpu what a step allocates on top on a GPU, for all values at once.
    step_cpu the same on a CPU, for the largest tensor alone.
    """

    state: float
    disk: float
    step_gpu: float = 0
    step_cpu: float = 0


# torch's default steps list by list on a GPU (foreach): the root of the second moment for all tensors at once; on a CPU
# tensor by tensor: that root, and the same once more after eps. Fused ones, torch's and ours, allocate nothing.
TORCH = Rule(state=8, disk=8, step_gpu=4, step_cpu=8)
TORCH_FUSED = Rule(state=8, disk=8)
EIGHT_BITS = Rule(state=2 * (1 + 4 / 256), disk=2 * (1 + 4 / 64))
FOUR_BITS = Rule(state=2 * (0.5 + 4 / 128), disk=2 * (0.5 + 4 / 64))

RULES = {
    "adamw_torch": TORCH,
    "adamw_torch_fused": TORCH_FUSED,
    "adamw8bit": EIGHT_BITS,
    "adamw4bit": FOUR_BITS,
    "adamwfp8": EIGHT_BITS,
    "adamw_torch_8bit": EIGHT_BITS,
    "adamw_torch_4bit": FOUR_BITS,
    "ao_adamw_fp8": EIGHT_BITS,
}


def rule_of(name: str) -> Rule:
    """ValueError for a name that the training config does not know either."""
    if name not in RULES:
        raise ValueError(f"optimizer is {name!r}, expected one of {', '.join(RULES)}")
    return RULES[name]
