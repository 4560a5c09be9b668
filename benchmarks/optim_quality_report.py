"""What optim_quality.py keeps of its runs, and says about them: paired differences, their error, and three pictures."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

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


def report(notes: list[str], runs: list[Run], picture: str | None) -> str:
    lines = ["# Low-bit AdamW against fp32 AdamW: held-out loss of a small language model", ""]
    lines += [f"* {note}" for note in notes]
    for recipe, groups in by_recipe(runs).items():
        lines += ["", f"## {recipe}", "", *_table(groups)]
    return "\n".join([*lines, *(["", f"![held-out loss and largest update]({picture})"] if picture else []), ""])


def _table(groups: Groups) -> Iterator[str]:
    yield (
        "| optimizer | held-out loss, mean over seeds | against fp32 AdamW, paired, +- standard error | target "
        "| largest single update | per seed |"
    )
    yield "|---|---|---|---|---|---|"
    base = groups.get(BASELINE, {})
    for name, group in groups.items():
        mean, error, num = paired_percent(group, base)
        difference = "" if name == BASELINE else f"{mean:+.3f}% +- {error:.3f} ({num})"
        target = f"{TARGETS_PERCENT[name]}%" if name in TARGETS_PERCENT else ""
        per_seed = ", ".join(f"{group[seed].final:.4f}" for seed in sorted(group))
        yield (
            f"| {name} | {statistics.mean(r.final for r in group.values()):.4f} | {difference} | {target} | "
            f"{max(max(r.moves) for r in group.values()):.2f} lr | {per_seed} |"
        )


def plot(runs: list[Run], path: Path) -> None:
    """Of the first recipe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recipe, groups = next(iter(by_recipe(runs).items()))
    base = groups.get(BASELINE, {})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5))
    for index, (name, group) in enumerate(groups.items()):
        style = {"color": f"C{index}", "linestyle": "--" if name.startswith("torchao") else "-", "label": name}
        steps = sorted(next(iter(group.values())).held_out)
        left.plot(steps, [statistics.mean(r.held_out[s] for r in group.values()) for s in steps], **style)
        pairs = [(run, base[seed]) for seed, run in group.items() if seed in base]
        if pairs and name != BASELINE:
            gaps = [statistics.mean(100 * (r.held_out[s] / b.held_out[s] - 1) for r, b in pairs) for s in steps]
            middle.plot(steps, gaps, **style)
        right.plot([max(moves) for moves in zip(*(r.moves for r in group.values()), strict=True)], lw=0.7, **style)
    left.set(xlabel="step", ylabel="held-out loss, nats", title=f"Held-out loss, mean over seeds; {recipe}")
    middle.set(xlabel="step", ylabel="%", title="Held-out loss against fp32 AdamW, paired")
    middle.set_yscale("symlog", linthresh=1)
    middle.axhline(0, color="black", lw=0.7)
    right.set(xlabel="step", ylabel="max |update| / lr", yscale="log", title="Largest single update, worst seed")
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
