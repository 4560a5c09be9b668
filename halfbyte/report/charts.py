"""Line and bar charts as inline SVG, drawn by matplotlib without a window.

Why static SVG and not Plotly or Vega: 10 kB a chart instead of 1 to 4 MB of script a page; nothing to execute, so the
page can forbid scripts altogether; it prints as it looks, scales on a phone, and its text is text. What is lost is the
cursor's read-out; a table with the exact numbers lies under each chart, which a keyboard and a screen reader reach too.

Colours are drawn as stand-ins and replaced by CSS variables, so that the page's dark mode reaches into the charts.
"""

import io
import re
from dataclasses import dataclass
from typing import Any

from halfbyte.report.html import Markup
from halfbyte.report.read import Points

INK, GRID, RUNS = "#010203", "#010204", ("#010205", "#010206")
VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)", RUNS[0]: "var(--run-a)", RUNS[1]: "var(--run-b)"}
INCHES = (5.2, 3.0)
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "halfbyte",
    "font.size": 11,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.use_mathtext": False,
    "text.parse_math": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
}
MOST_POINTS = 1200  # of a curve; more would be drawn on top of each other


@dataclass(frozen=True)
class Curve:
    """One line. run: 0 or 1, its colour; sparse ones get a marker at every point, and dashes."""

    label: str
    run: int
    points: Points
    sparse: bool = False


def line_chart(curves: list[Curve], y_label: str, *, prefix: str, log: bool = False) -> Markup:
    """An SVG; `prefix` keeps its ids apart from those of other charts."""
    from matplotlib import rc_context

    with rc_context(SETTINGS):
        figure, axes = new_figure()
        for curve in curves:
            steps, values = zip(*thinned(curve.points), strict=True)
            alone = len(steps) == 1 or curve.sparse
            axes.plot(
                steps,
                values,
                color=RUNS[curve.run],
                marker=("o", "s")[curve.run] if alone else None,
                markersize=5,
                linestyle="--" if curve.sparse else "-",
                linewidth=1.8 if curve.sparse or curve.run == 0 else 1.2,
            )
        if log:
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(y_label)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        return svg_of(figure, prefix)


def bar_chart(bars: list[tuple[str, list[float | None]]], unit: str, *, prefix: str) -> Markup:
    """Horizontal bars: (name, a value for each run), with the values written at their ends."""
    from matplotlib import rc_context

    runs = max(len(values) for _, values in bars)
    with rc_context(SETTINGS):
        figure, axes = new_figure()
        largest = max((value for _, values in bars for value in values if value is not None), default=1.0) or 1.0
        for index in range(runs):
            for row, (_, values) in enumerate(bars):
                value = values[index]
                if value is None:
                    continue
                y = row + (index - (runs - 1) / 2) * 0.4
                axes.barh(y, value, height=0.36 if runs > 1 else 0.6, color=RUNS[index], hatch="//" if index else None)
                axes.text(value + largest * 0.015, y, f"{value:.3g}", va="center", fontsize=10)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, largest * 1.15)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        return svg_of(figure, prefix)


def new_figure() -> tuple[Any, Any]:
    """A figure that belongs to no window and no global list."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.add_subplot()


def svg_of(figure: Any, prefix: str) -> Markup:
    """The figure as markup for the middle of a page: no header, own ids, the page's colours and font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', svg)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    for stand_in, variable in VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return Markup(svg)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most that many points: of each stretch the lowest and the highest, so that a spike stays to be seen."""
    if len(points) <= most:
        return points
    stretches = most // 2
    kept: Points = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        low, high = (choose(stretch, key=lambda point: point[1]) for choose in (min, max))
        kept += [low, high] if low[0] <= high[0] else [high, low]
    return kept
