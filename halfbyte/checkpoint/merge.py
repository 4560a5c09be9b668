"""`merge_checkpoint`: an NVFP4 base and a LoRA adapter as one checkpoint, streamed one tensor at a time.

What survived of the adapter is measured layer by layer, and the output only appears if it is enough: rounded to
nearest, an ordinary adapter keeps 1% to 67% of its gain, by learning rate and steps (docs/merge_aware.md), and nobody
should learn that in production.
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

from halfbyte.checkpoint.adapter import Adapter
from halfbyte.checkpoint.base import dense_base, open_base
from halfbyte.checkpoint.detect import FORMATS
from halfbyte.checkpoint.export import export_checkpoint
from halfbyte.checkpoint.merge_report import MIN_RETAINED, Check, MergeReport, Settings, judge
from halfbyte.checkpoint.merge_stream import DENSE_DTYPES, Merger
from halfbyte.checkpoint.output import atomic_folder
from halfbyte.checkpoint.quantize import Progress
from halfbyte.checkpoint.shard_writer import DEFAULT_SHARD_BYTES, parse_size
from halfbyte.lora import metadata as lora_metadata
from halfbyte.lora.merge import check_modes

TARGETS = ("nvfp4", *DENSE_DTYPES)


def merge_checkpoint(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: str = "nvfp4",
    format: str | None = None,
    rounding: str | None = None,
    scales: str | None = None,
    seed: int | None = None,
    onto: str | os.PathLike[str] | None = None,
    min_retained: float = MIN_RETAINED,
    any_base: bool = False,
    max_shard_size: str | int = DEFAULT_SHARD_BYTES,
    check: Check | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Write `base` with `adapter` merged into it to the folder `out`.

    to            "nvfp4", or "bf16", "fp16", "fp32".
    format        of an NVFP4 output; None: the base's own. Else as `export_checkpoint` writes it.
    rounding      "dither" or "nearest"; scales "keep" or "fresh"; seed of the dither (halfbyte.lora.merged_parts).
                  None: what a merge-aware adapter was trained with, else dither, keep, 0.
    onto          the dense original: the adapter is added to its weights, and those are quantized as the base was.
    min_retained  smallest share of the adapter's change that must survive, over all layers.
    any_base      True merges onto another base, or with another version of the quantizer, than the adapter recorded;
                  the report warns.
    check         called with the finished, still hidden folder; what it raises undoes the merge.
    memory        a few tensors.
    raises        ValueError, FileNotFoundError, FileExistsError; AdapterLost when too little survived. `out` is then
                  not there.
    """
    if to not in TARGETS:
        raise ValueError(f"to is {to!r}, expected {', '.join(TARGETS)}.")
    if format is not None and (format not in FORMATS or to != "nvfp4"):
        raise ValueError(
            f"format is {format!r} with to {to!r}, expected {', '.join(FORMATS)} with to 'nvfp4'. Leave format out for "
            "a dense output."
        )
    max_shard_bytes = parse_size(max_shard_size)
    with ExitStack() as stack:
        opened = stack.enter_context(open_base(base))
        lora = stack.enter_context(Adapter(adapter))
        recorded = lora_metadata.read(lora.folder)
        settings = choose_settings(recorded, to, rounding, scales, seed)
        dense = stack.enter_context(dense_base(onto, opened)) if onto is not None else None
        merger = Merger(opened, lora, settings, recorded, dense, any_base)
        with atomic_folder(out) as folder:
            merger.write(folder, max_shard_bytes, progress)
            judge(merger.report, min_retained)
            if format is not None and format != opened.format.name:
                merger.report.warnings += convert_in_place(folder, format, max_shard_bytes)
            if check is not None:
                check(folder, merger.report)
    return merger.report


def convert_in_place(folder: Path, format: str, max_shard_bytes: int) -> list[str]:
    """Turn a finished, still hidden folder into another format; returns what the export has to say."""
    merged, exported = folder / ".merged", folder / ".exported"
    files = list(folder.iterdir())
    merged.mkdir()
    for path in files:
        path.rename(merged / path.name)
    report = export_checkpoint(merged, exported, format=format, max_shard_size=max_shard_bytes)
    for path in exported.iterdir():
        path.rename(folder / path.name)
    exported.rmdir()
    shutil.rmtree(merged)
    return report.notices + [f"tensor scale moved by {by:+.1e}: {fqn}" for fqn, by in report.moved_scales.items()]


def choose_settings(
    recorded: lora_metadata.AdapterMetadata | None,
    to: str,
    rounding: str | None,
    scales: str | None,
    seed: int | None,
) -> Settings:
    """The caller's wishes over the adapter's record over the defaults. ValueError for a mode that does not exist."""
    own = recorded.quantizer if recorded is not None else lora_metadata.Quantizer()
    settings = Settings(
        to,
        own.rounding if rounding is None else rounding,
        own.scales if scales is None else scales,
        own.seed if seed is None else seed,
    )
    check_modes(settings.rounding, settings.scales)
    return settings
