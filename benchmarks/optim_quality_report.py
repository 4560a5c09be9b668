"""What optim_quality.py keeps of its runs, and says about them: paired differences, their error, and a picture."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASELINE = "adamw fp32"
TARGETS_PERCENT = {"halfbyte AdamW8bit": 0.2, "halfbyte AdamWFp8": 0.2, "halfbyte AdamW4bit": 0.6}


@dataclass(frozen=True)
class Run:
    """held_out {step: loss}, losses and moves (largest |update| / lr) one per step; recipe: lr and betas, in words."""

    recipe: str
    name: str
    seed: int
    held_out: dict[int, float]
    losses: list[float]
    moves: list[float]

    @property
    def final(self) -> float:
        return self.held_out[max(self.held_out)]


Groups = dict[str, dict[int, Run]]  # {optimizer: {seed: run}}


def append(path: Path, line: Run | list[str]) -> None:
    """Add a run, or notes, to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps({"notes": line} if isinstance(line, list) else asdict(line)) + "\n")


def read(paths: Iterable[Path]) -> tuple[list[str], list[Run]]:
    """The notes and runs of some files; a run that is there twice counts once, as it was last."""
    notes: list[str] = []
    runs: dict[tuple[str, str, int], Run] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if "notes" in line:
                notes += [note for note in line["notes"] if note not in notes]
                continue
            run = Run(**{**line, "held_out": {int(step): loss for step, loss in line["held_out"].items()}})
            runs[run.recipe, run.name, run.seed] = run
    return notes, list(runs.values())


def by_recipe(runs: Iterable[Run]) -> dict[str, Groups]:
    recipes: dict[str, Groups] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        recipes[run.recipe][run.name][run.seed] = run
    return recipes


def paired_percent(runs: dict[int, Run], base: dict[int, Run]) -> tuple[float, float, int]:
    """Mean and standard error, over the seeds that both have, of 100 (loss / baseline's loss - 1); how many seeds."""
    differences = [100 * (runs[seed].final / base[seed].final - 1) for seed in runs if seed in base]
    if not differences:
        return math.nan, math.nan, 0
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else math.nan
    return statistics.mean(differences), error, len(differences)


def report(notes: list[str], runs: list[Run], picture: str | None, sweep: Iterable[Run] = ()) -> str:
    """A table for each recipe; with `sweep`, one of the losses of its runs, and how far two runs of one kind differ."""
    lines = ["# Low-bit AdamW against fp32 AdamW: held-out loss of a small language model", ""]
    lines += [f"* {note}" for note in notes]
    for recipe, groups in by_recipe(runs).items():
        lines += ["", f"## {recipe}", "", *_table(groups)]
    lines += ["", f"![held-out loss and largest update]({picture})"] if picture else []
    sweep = list(sweep)
    if sweep:
        lines += ["", "## Choice of the learning rate", "", *_sweep_table(sweep), "", repeatability(runs, sweep)]
    return "\n".join([*lines, ""])


def _percent(mean: float, error: float, num: int) -> str:
    return f"{mean:+.3f}% +- {error:.3f} ({num})" if num else ""


def _table(groups: Groups) -> Iterator[str]:
    yield (
        "| optimizer | held-out loss, mean over seeds | against fp32 AdamW, paired, +- standard error (seeds) | target "
        "| against torchao's, paired | largest single update | per seed |"
    )
    yield "|---|---|---|---|---|---|---|"
    base = groups.get(BASELINE, {})
    for name, group in groups.items():
        against_base = "" if name == BASELINE else _percent(*paired_percent(group, base))
        peer = groups.get(name.replace("halfbyte", "torchao"), {}) if name.startswith("halfbyte") else {}
        target = f"{TARGETS_PERCENT[name]}%" if name in TARGETS_PERCENT else ""
        per_seed = ", ".join(f"{group[seed].final:.4f}" for seed in sorted(group))
        yield (
            f"| {name} | {statistics.mean(r.final for r in group.values()):.4f} | {against_base} | {target} | "
            f"{_percent(*paired_percent(group, peer))} | {largest_move(group):.2f} lr | {per_seed} |"
        )


def largest_move(group: dict[int, Run]) -> float:
    return max(max(run.moves) for run in group.values())


def _sweep_table(runs: list[Run]) -> Iterator[str]:
    """Held-out loss of each optimizer, mean over its seeds, and its largest update; a row for each recipe."""
    recipes = by_recipe(runs)
    names = list(dict.fromkeys(run.name for run in runs))
    seeds = ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    yield f"| held-out loss and largest update, seed {seeds} | " + " | ".join(names) + " |"
    yield "|---|" + "---|" * len(names)
    for recipe, groups in recipes.items():
        cells = [_loss_and_move(groups[name]) if name in groups else "" for name in names]
        yield f"| {recipe} | " + " | ".join(cells) + " |"


def _loss_and_move(group: dict[int, Run]) -> str:
    return f"{statistics.mean(run.final for run in group.values()):.4f}, {largest_move(group):.2f} lr"


def repeatability(runs: Iterable[Run], others: Iterable[Run]) -> str:
    """What one and the same run (recipe, optimizer, seed), made twice, differs by."""
    firsts = {(run.recipe, run.name, run.seed): run for run in runs}
    keys = ((run, firsts.get((run.recipe, run.name, run.seed))) for run in others)
    differences = [100 * (second.final / first.final - 1) for second, first in keys if first is not None]
    if not differences:
        return "No run was made twice."
    rms = (sum(d * d for d in differences) / len(differences)) ** 0.5
    return (
        f"{len(differences)} runs of this table are in those above too, made anew: their losses differ by "
        f"{rms:.2f}% (RMS), at most {max(map(abs, differences)):.2f}%. A GPU adds gradients in no fixed order."
    )


# --- The picture ----------------------------------------------------------------------------------

COLORS = {"8bit": "tab:blue", "4bit": "tab:red", "Fp8": "tab:green"}
WINDOW = 20  # steps whose largest update is one point of the line


def _style(name: str) -> dict[str, Any]:
    """fp32 black; a format has a color, ours a full line, torchao's a broken one."""
    for form, color in COLORS.items():
        if name.endswith(form):
            theirs = name.startswith("torchao")
            return {"color": color, "linestyle": "--" if theirs else "-", "label": name}
    return {"color": "gray" if "rerun" in name else "black", "linestyle": "-", "label": name}


def plot(runs: list[Run], path: Path) -> None:
    """A row for each recipe: loss while training, gap at the end with every seed, largest update."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recipes = by_recipe(runs)
    figure, axes = plt.subplots(len(recipes), 3, figsize=(15, 0.6 + 4.1 * len(recipes)), squeeze=False)
    for (recipe, groups), (left, middle, right) in zip(recipes.items(), axes, strict=True):
        _plot_losses(left, groups)
        left.set_title(f"{recipe}: held-out loss")
        _plot_gaps(middle, groups)
        _plot_moves(right, groups)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _plot_losses(axes: Any, groups: Groups) -> None:
    for name, group in groups.items():
        steps = sorted(next(iter(group.values())).held_out)
        axes.plot(steps, [statistics.mean(r.held_out[s] for r in group.values()) for s in steps], lw=1, **_style(name))
    axes.set(xlabel="step", ylabel="nats, mean over seeds")


def _plot_gaps(axes: Any, groups: Groups) -> None:
    base = groups.get(BASELINE, {})
    names = [name for name in groups if name != BASELINE]
    for row, name in enumerate(names):
        mean, error, num = paired_percent(groups[name], base)
        if not num:
            continue
        color = _style(name)["color"]
        gaps = [100 * (run.final / base[seed].final - 1) for seed, run in groups[name].items() if seed in base]
        axes.plot(gaps, [row] * num, ".", color=color, alpha=0.5)
        filled = "white" if name.startswith("torchao") else color
        axes.errorbar(mean, row, xerr=0 if math.isnan(error) else error, fmt="o", color=color, mfc=filled, capsize=4)
        if name in TARGETS_PERCENT:
            axes.plot([TARGETS_PERCENT[name]] * 2, [row - 0.4, row + 0.4], color="black", lw=2)
    axes.axvline(0, color="black", lw=0.7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="%", title="At the end against fp32 AdamW, paired\n(mean, standard error, seeds; bar: target)")


def _plot_moves(axes: Any, groups: Groups) -> None:
    for name, group in groups.items():
        worst = [max(moves) for moves in zip(*(run.moves for run in group.values()), strict=True)]
        steps = range(0, len(worst), WINDOW)
        axes.plot(steps, [max(worst[step : step + WINDOW]) for step in steps], lw=1, **_style(name))
    axes.axhline(3, color="black", lw=0.7, linestyle=":")
    axes.set(xlabel="step", ylabel="max |update| / lr", yscale="log")
    axes.set_title(f"Largest single update, worst seed\n(of {WINDOW} steps; dotted: 3)")
