"""What is seen and kept of a run: a progress bar, metrics.jsonl, loss.png.

Each is a `TrainerCallback` that only reads; the numbers themselves (tokens per second, memory) are added to the logs
by the trainer, so that TensorBoard or W&B get them too.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from halfbyte.checkpoint.output import write_text
from halfbyte.train.files import read_metrics

LINES = 20  # of progress, where the output is no terminal


class Clock(TrainerCallback):
    """Seconds spent in training steps since last asked; evaluations and saves do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._began is not None:
            self.seconds += time.perf_counter() - self._began
            self._began = None

    def lap(self) -> float:
        """Seconds since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class MetricsFile(TrainerCallback):
    """One JSON object a line for every log: step, loss, learning_rate, tokens_per_second, eval_loss, ..."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            kept = [row for row in read_metrics(self.path) if row["step"] <= state.global_step and state.global_step]
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            # JSON has no NaN; a number that is none is written as null
            finite = {key: value if math.isfinite(value) else None for key, value in logs.items()}
            write_text(self.path, json.dumps({"step": state.global_step, **finite}) + "\n", append=True)


class Diverged(TrainerCallback):
    """Ends a run whose loss is NaN or infinite: no later step mends that, and a save would replace a good adapter."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            raise ValueError(
                f"the training loss is {loss} at step {state.global_step}, expected a number; lower learning_rate, or "
                "raise warmup_steps, and resume from an earlier checkpoint or start anew"
            )


class LossPlot(TrainerCallback):
    """loss.png, drawn from metrics.jsonl at every checkpoint and at the end."""

    def __init__(self, metrics: Path, plot: Path):
        self.metrics, self.plot = metrics, plot

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            plot_losses(read_metrics(self.metrics), self.plot)

    on_train_end = on_save


class ProgressLine(TrainerCallback):
    """A bar with loss, learning rate, tokens/s and memory; some lines instead where stderr is no terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        text = progress_text(logs)
        if self._bar is not None and "loss" in logs:
            self._bar.update(self._task, completed=state.global_step, description=text)
        elif self._bar is not None and "eval_loss" in logs:
            self._bar.console.print(f"step {state.global_step}: {text}")
        elif text and ("eval_loss" in logs or state.global_step % max(1, state.max_steps // LINES) == 0):
            print(f"step {state.global_step}/{state.max_steps}: {text}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def progress_text(logs: dict[str, Any]) -> str:
    """The few numbers that a user watches."""
    if "eval_loss" in logs:
        return f"held-out loss {logs['eval_loss']:.4f}"
    if "loss" not in logs:
        return ""
    return (
        f"loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  {logs['tokens_per_second']:,.0f} tokens/s  "
        f"{logs['memory_gb']:.2f} GB"
    )


def plot_losses(rows: list[dict[str, Any]], path: Path) -> None:
    """Training and held-out loss over steps as a PNG; nothing when there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {
        label: [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        for label, key in (("training", "loss"), ("held out", "eval_loss"))
    }
    if not any(curves.values()):
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)")
    for label, points in curves.items():
        if points:
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, label=label, marker="o" if label == "held out" else None, linewidth=1.2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
