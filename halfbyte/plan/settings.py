"""What a run sets, as far as memory, disk and network depend on it. The names are the training config's."""

from dataclasses import dataclass
from typing import Literal

Forward = Literal["fused", "peft", "merge-aware"]
Loss = Literal["fused-head", "logits"]


@dataclass(frozen=True)
class Settings:
    """A run.

    bf16       compute in bf16; else fp32.
    device     "cuda" or "cpu".
    forward    of a LoRA layer over an NVFP4 weight: fused (`halfbyte train`), PEFT's own, or merge-aware.
    loss       fused-head: TRL's, as `halfbyte train` runs it; logits: the model's own, as in a loop of one's own.
    autocast   the forward runs under autocast, as `Trainer` runs it where bf16 is set.
    packed     the base is NVFP4; False plans a dense base.
    padded     batches carry an attention mask (padding or packing); None: whenever there is more than one example.
    """

    micro_batch_size: int = 1
    sequence_len: int = 2048
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    lora_r: int = 16
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] | str = "all-linear"
    lora_modules_to_save: tuple[str, ...] = ()
    optimizer: str = "adamw_torch"
    bf16: bool = True
    device: str = "cuda"
    forward: Forward = "fused"
    loss: Loss = "fused-head"
    autocast: bool = True
    packed: bool = True
    padded: bool | None = None

    @property
    def tokens(self) -> int:
        """M: tokens of a forward pass on one rank, padding included."""
        return self.micro_batch_size * self.sequence_len

    @property
    def width(self) -> int:
        """c: bytes of an activation."""
        return 2 if self.bf16 else 4

    @property
    def masked(self) -> bool:
        """Whether attention gets a mask."""
        return self.micro_batch_size > 1 if self.padded is None else self.padded
