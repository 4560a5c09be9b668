"""LoRA adapters over a frozen NVFP4 weight: merging them, training them for the merge, and what their files say."""

from halfbyte.lora.adapter_files import load_adapter, save_adapter
from halfbyte.lora.fused import fuse
from halfbyte.lora.merge import merged_parts
from halfbyte.lora.merge_aware import (
    make_merge_aware,
    merged_digest,
    merged_weights,
    set_merge_aware,
    start_step,
)
from halfbyte.lora.retention import Retention, retention

__all__ = [
    "Retention",
    "fuse",
    "load_adapter",
    "make_merge_aware",
    "merged_digest",
    "merged_parts",
    "merged_weights",
    "retention",
    "save_adapter",
    "set_merge_aware",
    "start_step",
]
