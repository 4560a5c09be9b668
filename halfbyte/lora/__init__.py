"""LoRA adapters over a frozen NVFP4 weight: merging them, training them for the merge, and what their files say."""

from halfbyte.lora.fused import fuse
from halfbyte.lora.merge import merged_parts
from halfbyte.lora.retention import Retention, retention

__all__ = ["Retention", "fuse", "merged_parts", "retention"]
