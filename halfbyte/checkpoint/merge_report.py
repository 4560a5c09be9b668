"""What a merge did, layer by layer, and the verdict on it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from halfbyte.lora.retention import Retention, total

MIN_RETAINED = 0.85


@dataclass(frozen=True)
class Settings:
    """How the merged weights are rounded. Fields left None by the caller are the adapter's own, or the defaults."""

    to: str = "nvfp4"
    rounding: str = "dither"
    scales: str = "keep"
    seed: int = 0


@dataclass(frozen=True)
class MergedLayer:
    """One line of the report. kind: "nvfp4" or the dense dtype in which the layer is written."""

    name: str
    kind: str
    retention: Retention

    def figures(self) -> dict[str, str | float]:
        """For the record beside the merged weights."""
        kept = self.retention
        numbers = {"kept": kept.kept, "noise": kept.noise, "relative_delta": kept.relative_delta}
        return {"as": self.kind, **{name: round(value, 6) for name, value in numbers.items()}}


@dataclass
class MergeReport:
    """What was done. replaced: parameters that the adapter carried whole; warnings: for the user's eyes."""

    settings: Settings
    layers: list[MergedLayer] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def retained(self) -> Retention:
        """Over all layers, each weighing by its change."""
        return total(layer.retention for layer in self.layers)

    def worst(self, count: int) -> list[MergedLayer]:
        """The layers that kept least of their change, in the model's order; NaN counts as least."""
        kept = {layer.name: layer.retention.kept for layer in self.layers}
        least = sorted(kept, key=lambda name: (not math.isnan(kept[name]), kept[name]))[:count]
        return [layer for layer in self.layers if layer.name in least]


class AdapterLost(ValueError):
    """Too little of the adapter survived; `report` says where."""

    def __init__(self, message: str, report: MergeReport):
        super().__init__(message)
        self.report = report


def judge(report: MergeReport, min_retained: float) -> None:
    """AdapterLost when the layers together kept less than that share."""
    kept = report.retained.kept
    if not kept >= min_retained:  # also when either is NaN
        raise AdapterLost(
            f"Only {kept:.1%} of the adapter's change survived the rounding, less than the {min_retained:.0%} asked "
            "for. Nothing was written. Use --rounding dither, merge onto the dense original with --onto, write --to "
            "bf16, or accept it with a lower --min-retained.",
            report,
        )


Check = Callable[[Path, MergeReport], None]
