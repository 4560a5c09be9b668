"""The sections of the page, in order; each returns None when the runs have nothing to say about it."""

from collections.abc import Callable

from halfbyte.report.charts import Curve
from halfbyte.report.figures import bars_figure, curves_figure, median
from halfbyte.report.heat import Scale, heat_map
from halfbyte.report.html import Child, Markup, foreign, number, tag
from halfbyte.report.read import Run, finite

KINDS = {
    "base": "frozen base",
    "adapter": "adapter",
    "gradients": "gradients",
    "optimizer": "optimizer states",
}
REST = "everything else"
KEYS = ("a", "b")


def glance(runs: list[Run]) -> Markup | None:
    """The few numbers one comes for."""
    tiles: list[tuple[str, list[Child]]] = [
        ("held-out loss", [held_out(run) for run in runs]),
        ("last training loss", [last(run, "loss") for run in runs]),
        ("optimizer steps", [last_step(run) for run in runs]),
        ("tokens/s, median", [shown(median(run.series("tokens_per_second")), ",.0f") for run in runs]),
        ("peak memory, GB", [shown(peak_gb(run), ".2f") for run in runs]),
        ("kept by the merge", [shown(overall_kept(run), ".1%") for run in runs]),
    ]
    return tag(
        "dl",
        [
            tag("div", tag("dt", name), [tag("dd", key(i, runs), value) for i, value in enumerate(values) if value])
            for name, values in tiles
            if any(values)
        ],
        class_="tiles",
    )


def held_out(run: Run) -> Child:
    """First and last held-out loss."""
    points = run.series("eval_loss")
    if len(points) < 2:
        return shown(points[0][1], ".4f") if points else None
    return tag("span", number(points[0][1], ".3f"), " \u2192 ", number(points[-1][1], ".3f"))


def last(run: Run, name: str) -> Child:
    points = run.series(name)
    return shown(points[-1][1], ".4f") if points else None


def last_step(run: Run) -> Child:
    steps = [step for step, _ in run.series("step")]
    return shown(max(steps), ",g") if steps else None


def shown(value: float | None, spec: str) -> Markup | None:
    return None if value is None else number(value, spec)


def peak_gb(run: Run) -> float | None:
    return max((value for _, value in run.series("memory_gb")), default=None)


def overall_kept(run: Run) -> float | None:
    """The whole model's, in which layers weigh by their change."""
    return finite(run.merge.get("retained"))


def key(index: int, runs: list[Run]) -> Markup | None:
    """The run's colour, with its letter for those who do not see it; nothing where there is one run."""
    if len(runs) == 1:
        return None
    return tag("span", class_=f"key {KEYS[index]}", role="img", aria_label=f"run {KEYS[index].upper()}")


def named(label: str, index: int, runs: list[Run]) -> str:
    """A curve's name; with two runs the letter that the legend explains."""
    return f"{label}, {KEYS[index].upper()}" if len(runs) > 1 else label


def curves_of(runs: list[Run], metric: str, label: str, *, sparse: bool = False) -> list[Curve]:
    return [Curve(named(label, i, runs), i, run.series(metric), sparse) for i, run in enumerate(runs)]


def training(runs: list[Run]) -> Child:
    """What the metrics file holds."""
    losses = curves_of(runs, "loss", "training") + curves_of(runs, "eval_loss", "held out", sparse=True)
    figures = [
        curves_figure("Loss", "nats per token", losses),
        curves_figure("Learning rate", "learning rate", curves_of(runs, "learning_rate", "learning rate")),
        curves_figure("Gradient norm", "norm before clipping", curves_of(runs, "grad_norm", "gradient norm")),
        curves_figure("Speed", "tokens/s", curves_of(runs, "tokens_per_second", "tokens/s")),
        curves_figure("Peak memory", "GB", curves_of(runs, "memory_gb", "peak memory")),
        memory(runs),
    ]
    drawn = [figure for figure in figures if figure is not None]
    return tag("div", drawn, class_="grid") if drawn else None


def memory(runs: list[Run]) -> Markup | None:
    """Bytes by kind; what the peak holds beyond them is one bar more."""
    if not any(run.memory for run in runs):
        return None
    bars: list[tuple[str, list[float | None]]] = [
        (name, [run.memory[kind] / 1e9 if kind in run.memory else None for run in runs]) for kind, name in KINDS.items()
    ]
    rest: list[float | None] = []
    for run in runs:
        peak, known = peak_gb(run), sum(run.memory.get(kind, 0.0) for kind in KINDS) / 1e9
        rest.append(max(0.0, peak - known) if peak is not None and run.memory else None)
    return bars_figure("Memory by kind", "GB", [named("run", i, runs) for i in range(len(runs))], [*bars, (REST, rest)])


def quantization(runs: list[Run]) -> Child:
    """The base's error, layer by layer."""
    if not any(run.errors for run in runs):
        return None
    values = [value for run in runs for value in run.errors.values()]
    scale = Scale(min(values), max(values), 100, ".1f")
    bases: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for index, run in enumerate(runs):
        if run.errors:
            bases.setdefault(tuple(sorted(run.errors.items())), []).append(index)
    maps = []
    for errors, members in bases.items():
        whose = f" ({', '.join(named('run', index, runs) for index in members)})" if len(bases) > 1 else ""
        maps.append(tag("div", heat_map(dict(errors), scale, f"Error of each layer in percent{whose}"), class_="card"))
    return [
        tag("p", "Length of the rounding error of each 4-bit weight, relative to the weight's length."),
        legend_bar(f"{scale.low:.1%}", f"{scale.high:.1%}"),
        tag("div", maps, class_="grid maps"),
    ]


def kept(runs: list[Run]) -> Child:
    """What a merge left of the adapter, layer by layer."""
    if not any(run.kept() for run in runs):
        return None
    maps: list[Child] = []
    for index, run in enumerate(runs):
        if not run.kept():
            continue
        facts = {name: run.merge.get(fact) for name, fact in MERGE_FACTS.items()}
        how = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        caption = f"{named('Share kept', index, runs)}, in percent"
        maps.append(tag("div", tag("p", how), heat_map(run.kept(), Scale(0, 1, 100), caption), class_="card"))
    return [
        tag(
            "p",
            "Share of the wanted change that is in the merged weights, along its own direction: 100 is all of it, 0 is "
            "rounded away. Single layers may lie a little above 100, since the dither is random.",
        ),
        legend_bar("0%", "100%"),
        tag("div", maps, class_="grid maps"),
    ]


MERGE_FACTS = {"to": "to", "rounding": "rounding", "block scales": "block_scales", "seed": "seed"}


def legend_bar(low: str, high: str) -> Markup:
    """What the colours mean."""
    return tag("div", tag("span", low), tag("span", class_="bar"), tag("span", high), class_="scale")


def samples(runs: list[Run]) -> Child:
    """The same prompts, before and after."""
    columns: list[tuple[str, dict[str, str]]] = []
    for index, run in enumerate(runs):
        rows = [row for row in run.samples if isinstance(row.get("step"), int)]
        steps = sorted({row["step"] for row in rows})
        for step in dict.fromkeys(steps[:1] + steps[-1:]):
            when = "before" if step == 0 else f"after {step} steps"
            answers = {str(row["prompt"]): str(row["answer"]) for row in rows if row["step"] == step}
            columns.append((named(when, index, runs), answers))
    prompts = list(dict.fromkeys(prompt for _, answers in columns for prompt in answers))
    if not prompts:
        return None
    head = tag("tr", [tag("th", name, scope="col", class_="text") for name in ("prompt", *(c for c, _ in columns))])
    body = [
        tag(
            "tr",
            tag("th", foreign(prompt), scope="row", class_="text"),
            [
                tag("td", foreign(answers.get(prompt, "").strip()), class_="text", data_label=name)
                for name, answers in columns
            ],
        )
        for prompt in prompts
    ]
    table = tag("table", tag("thead", head), tag("tbody", body), class_="wide stack", aria_label="Sample answers")
    return tag("div", table, class_="scroll card", tabindex=0, role="region", aria_label="Sample answers")


def checkpoints(runs: list[Run]) -> Child:
    rows = [
        tag(
            "tr",
            tag("th", tag("code", checkpoint.name), scope="row"),
            tag("td", named("run", index, runs)) if len(runs) > 1 else None,
            tag("td", number(checkpoint.size_bytes / 1e6, ",.1f")),
            tag("td", "complete" if checkpoint.complete else "not complete; cannot be resumed from", class_="text"),
        )
        for index, run in enumerate(runs)
        for checkpoint in run.checkpoints
    ]
    if not rows:
        return None
    names = ["checkpoint", *(["run"] if len(runs) > 1 else []), "MB"]
    head = tag("tr", [tag("th", name, scope="col") for name in names], tag("th", "state", scope="col", class_="text"))
    table = tag("table", tag("thead", head), tag("tbody", rows), aria_label="Checkpoints")
    return tag("div", table, class_="scroll card", tabindex=0, role="region", aria_label="Checkpoints")


def configuration(runs: list[Run]) -> Child:
    return settings_table(runs, lambda run: run.config, "Configuration")


def versions(runs: list[Run]) -> Child:
    return settings_table(runs, lambda run: run.versions, "Versions")


def settings_table(runs: list[Run], of: Callable[[Run], dict[str, str]], title: str) -> Child:
    """Key and value; of two runs side by side, those first in which they differ, marked as such."""
    keys = list(dict.fromkeys(name for run in runs for name in of(run)))
    if not keys:
        return None
    differing = [name for name in keys if len({of(run).get(name) for run in runs}) > 1]
    ordered = differing + [name for name in keys if name not in differing]
    body = [
        tag(
            "tr",
            tag("th", tag("code", foreign(name)), scope="row", class_="differs" if name in differing else None),
            [tag("td", foreign(of(run).get(name, "not set")), class_="text") for run in runs],
        )
        for name in ordered
    ]
    head = tag(
        "tr",
        tag("th", "key", scope="col"),
        [tag("th", named("value", index, runs), scope="col", class_="text") for index in range(len(runs))],
    )
    words = f"{len(differing)} of {len(keys)} differ; they come first" if len(runs) > 1 else f"{len(keys)} keys"
    table = tag("table", tag("thead", head), tag("tbody", body), class_="wide", aria_label=title)
    region = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)
    return tag("details", tag("summary", words), region, open=len(keys) < 16 or bool(differing))


SECTIONS: dict[str, Callable[[list[Run]], Child]] = {
    "Training": training,
    "Sample answers": samples,
    "Kept by the merge": kept,
    "Quantization error": quantization,
    "Checkpoints": checkpoints,
    "Configuration": configuration,
    "Versions": versions,
}
