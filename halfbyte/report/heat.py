"""A picture of layers x projections that is a table: every cell has its colour and its number.

So a screen reader reads what an eye sees, it prints, and nothing depends on telling colours apart. The colours are
matplotlib's cividis, made to look alike to all kinds of colour vision.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.report.html import Markup, number, tag

INDEXED = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block|layer)\.(\d+)\.(.+)")
ORDER = ("qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down")
MOST_COLUMNS = 12  # more (experts) would be a picture of nothing
DARK = 0.179  # relative luminance at which black and white text have the same contrast (WCAG 2)


@dataclass(frozen=True)
class Scale:
    """low and high end of the colours, and how a number is written in a cell."""

    low: float
    high: float
    factor: float = 1.0
    spec: str = ".0f"


def heat_map(values: Mapping[str, float], scale: Scale, caption: str) -> Markup:
    """A table of layer x projection; of a line per layer where names do not fall into such a grid."""
    grid, rest = arrange(values)
    columns = sorted(dict.fromkeys(column for row in grid.values() for column in row), key=place)
    if len(columns) > MOST_COLUMNS:
        grid, columns, rest = {}, [], dict(values)
    parts = []
    if grid:
        head = tag("tr", tag("th", "layer", scope="col"), [tag("th", short(name), scope="col") for name in columns])
        body = [
            tag("tr", tag("th", index, scope="row"), [cell(row.get(column), scale) for column in columns])
            for index, row in sorted(grid.items())
        ]
        parts.append(tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body), class_="heat"))
    if rest:
        head = tag("tr", tag("th", "layer", scope="col"), tag("th", "value", scope="col"))
        body = [tag("tr", tag("th", name, scope="row"), cell(rest[name], scale)) for name in sorted(rest)]
        title = "Other layers" if grid else caption
        parts.append(tag("table", tag("caption", title), tag("thead", head), tag("tbody", body), class_="heat"))
    return tag("div", parts, class_="scroll", tabindex=0, role="region", aria_label=caption)


def arrange(values: Mapping[str, float]) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """(layer index -> projection -> value, the names without an index)."""
    grid: dict[int, dict[str, float]] = {}
    rest: dict[str, float] = {}
    for name, value in values.items():
        found = INDEXED.fullmatch(name)
        if found is None or len(found[1]) > 6:
            rest[name] = value
        else:
            grid.setdefault(int(found[1]), {})[found[2]] = value
    return grid, rest


def place(column: str) -> int:
    """In the order of the forward pass; what has no place in it comes last, in the order met."""
    last = column.rpartition(".")[2].removesuffix("_proj")
    return ORDER.index(last) if last in ORDER else len(ORDER)


def short(name: str) -> Markup:
    """`self_attn.q_proj` as `q`, in full on the pointer and for a reader."""
    last = name.rpartition(".")[2]
    return tag("abbr", last.removesuffix("_proj") or last, title=name)


def cell(value: float | None, scale: Scale) -> Markup:
    """One number on its colour."""
    if value is None:
        return tag("td", "")
    from matplotlib import colormaps

    span = scale.high - scale.low
    share = min(1.0, max(0.0, (value - scale.low) / span)) if span > 0 else 1.0
    red, green, blue, _ = colormaps["cividis"](share)
    ink = "#fff" if luminance(red, green, blue) < DARK else "#000"
    background = "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
    shown = number(value * scale.factor, scale.spec) if scale.factor == 1 else scaled(value, scale)
    return tag("td", shown, style=f"background:{background};color:{ink}")


def luminance(*colour: float) -> float:
    """Relative luminance of an sRGB colour with parts from 0 to 1."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def scaled(value: float, scale: Scale) -> Markup:
    """The number in the cell's unit, its own value kept beside it."""
    return tag("data", format(value * scale.factor, scale.spec), value=repr(value))
