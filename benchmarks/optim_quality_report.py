"""What optim_quality.py says about its runs: paired differences, their standard error, and two pictures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

BASELINE = "adamw fp32"
TARGETS_PERCENT = {"halfbyte AdamW8bit": 0.2, "halfbyte AdamWFp8": 0.2, "halfbyte AdamW4bit": 0.6}
TARGET_MOVE = 3.0  # units of lr


@dataclass(frozen=True)
class Run:
    """held_out {step: loss}, losses and moves (largest |update| / lr) one per step."""

    name: str
    seed: int
    held_out: dict[int, float]
    losses: list[float]
    moves: list[float]

    @property
    def final(self) -> float:
        return self.held_out[max(self.held_out)]


def by_name(runs: list[Run]) -> dict[str, dict[int, Run]]:
    groups: dict[str, dict[int, Run]] = defaultdict(dict)
    for run in runs:
        groups[run.name][run.seed] = run
    return groups


def paired_percent(runs: dict[int, Run], base: dict[int, Run]) -> tuple[float, float]:
    """Mean and standard error, over the seeds, of 100 (loss / baseline's loss - 1)."""
    differences = [100 * (runs[seed].final / base[seed].final - 1) for seed in runs]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return statistics.mean(differences), error


def report(runs: list[Run], notes: list[str], stem: str) -> str:
    groups = by_name(runs)
    base = groups.get(BASELINE)
    lines = [
        "# Low-bit AdamW against fp32 AdamW: held-out loss of a small language model",
        "",
        *[f"* {note}" for note in notes],
        "",
        "| optimizer | held-out loss, mean over seeds | against fp32 AdamW, paired, +- standard error | target "
        "| largest single update | per seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        difference = "not run"
        if base is not None and name != BASELINE:
            mean, error = paired_percent(group, base)
            difference = f"{mean:+.3f}% +- {error:.3f}"
        target = f"{TARGETS_PERCENT[name]}%, 3 lr" if name in TARGETS_PERCENT else ""
        per_seed = ", ".join(f"{run.final:.4f}" for run in group.values())
        lines.append(
            f"| {name} | {statistics.mean(r.final for r in group.values()):.4f} | "
            f"{'' if name == BASELINE else difference} | {target} | "
            f"{max(max(r.moves) for r in group.values()):.2f} lr | {per_seed} |"
        )
    return "\n".join([*lines, "", f"![held-out loss and largest update]({stem}.png)", ""])


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_name(runs)
    base = groups.get(BASELINE)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5))
    for index, (name, group) in enumerate(groups.items()):
        style = {"color": f"C{index}", "linestyle": "--" if name.startswith("torchao") else "-", "label": name}
        steps = sorted(next(iter(group.values())).held_out)
        left.plot(steps, [statistics.mean(r.held_out[s] for r in group.values()) for s in steps], **style)
        if base is not None:
            gap = [
                statistics.mean(100 * (r.held_out[s] / base[seed].held_out[s] - 1) for seed, r in group.items())
                for s in steps
            ]
            middle.plot(steps, gap, **style)
        right.plot([max(moves) for moves in zip(*(r.moves for r in group.values()), strict=True)], lw=0.7, **style)
    left.set(xlabel="step", ylabel="held-out loss, nats", title="Held-out loss, mean over seeds")
    middle.set(xlabel="step", ylabel="%", title="Held-out loss against fp32 AdamW, paired")
    middle.set_yscale("symlog", linthresh=1)
    right.set(xlabel="step", ylabel="max |update| / lr", yscale="log", title="Largest single update, worst seed")
    right.axhline(TARGET_MOVE, color="black", lw=0.7)
    left.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
