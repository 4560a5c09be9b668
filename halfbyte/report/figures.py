"""One chart with what makes it readable without eyes: a sentence of what it shows, and a table of its numbers."""

from halfbyte.report.charts import Curve, bar_chart, line_chart
from halfbyte.report.html import Markup, number, slug, tag
from halfbyte.report.read import Points

MOST_ROWS = 200  # of a table; metrics.jsonl has them all


def curves_figure(title: str, unit: str, curves: list[Curve], *, log: bool = False) -> Markup | None:
    """A line chart; None when there is nothing to draw."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    name = slug(title)
    return tag(
        "figure",
        tag("h3", title, id=f"{name}-title"),
        legend(curves) if len(curves) > 1 else None,
        tag(
            "div",
            line_chart(curves, unit, prefix=name, log=log),
            role="img",
            aria_labelledby=f"{name}-title",
            aria_describedby=f"{name}-text",
        ),
        tag("figcaption", [tag("span", sentence(curve), " ") for curve in curves], id=f"{name}-text"),
        numbers_table(title, curves),
    )


def legend(curves: list[Curve]) -> Markup:
    """Which line is which: colour for the run, dashes for what is measured now and then."""
    items = [
        tag("li", tag("span", class_=f"key {'ab'[curve.run]}{' dashed' if curve.sparse else ''}"), curve.label)
        for curve in curves
    ]
    return tag("ul", items, class_="legend small")


def sentence(curve: Curve) -> str:
    """What the eye takes from a curve."""
    values = [value for _, value in curve.points]
    first, last = curve.points[0], curve.points[-1]
    if len(values) == 1:
        return f"{curve.label}: {values[0]:,.4g} at step {first[0]:g}."
    low, high = min(values), max(values)
    return (
        f"{curve.label}: {first[1]:,.4g} at step {first[0]:g}, {last[1]:,.4g} at step {last[0]:g}; between {low:,.4g} "
        f"and {high:,.4g}."
    )


def numbers_table(title: str, curves: list[Curve]) -> Markup:
    """The curves' numbers, a row for each step; evenly thinned when there are very many."""
    columns = [dict(curve.points) for curve in curves]
    steps = sorted({step for column in columns for step in column})
    shown = spread(steps, MOST_ROWS)
    left_out = len(steps) - len(shown)
    head = tag("tr", tag("th", "step", scope="col"), [tag("th", curve.label, scope="col") for curve in curves])
    body = [
        tag(
            "tr",
            tag("th", f"{step:g}", scope="row"),
            [tag("td", number(column[step], ",.5g") if step in column else "") for column in columns],
        )
        for step in shown
    ]
    more = f" {left_out:,} more steps are in metrics.jsonl." if left_out else ""
    table = tag("table", tag("caption", f"{title}, by step.{more}"), tag("thead", head), tag("tbody", body))
    return tag(
        "details",
        tag("summary", f"Numbers ({len(shown):,} steps)"),
        tag("div", table, class_="scroll tall", tabindex=0, role="region", aria_label=f"{title}: numbers"),
    )


def spread(items: list[float], most: int) -> list[float]:
    """At most that many, evenly chosen, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def bars_figure(title: str, unit: str, names: list[str], bars: list[tuple[str, list[float | None]]]) -> Markup:
    """A bar chart of (kind, a value for each run) with its table."""
    name = slug(title)
    head = tag("tr", tag("th", "kind", scope="col"), [tag("th", f"{run} ({unit})", scope="col") for run in names])
    body = [
        tag("tr", tag("th", kind, scope="row"), [tag("td", "" if v is None else number(v)) for v in values])
        for kind, values in bars
    ]
    return tag(
        "figure",
        tag("h3", title, id=f"{name}-title"),
        tag("div", bar_chart(bars, unit, prefix=name), role="img", aria_labelledby=f"{name}-title"),
        tag("table", tag("caption", f"{title}, {unit}"), tag("thead", head), tag("tbody", body)),
    )


def median(points: Points) -> float | None:
    """Of the values; None of none."""
    values = sorted(value for _, value in points)
    return values[len(values) // 2] if values else None
