"""What is shown and kept, away from any run: torn lines, missing numbers, the plot, the clock."""

import json
from types import SimpleNamespace

import pytest

from halfbyte.train import callbacks
from halfbyte.train.files import read_metrics


def state(step: int, last: int = 10) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=last, is_world_process_zero=True)


def test_a_line_torn_by_a_kill_is_passed_over(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n[3]\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.0}]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize(("resumed_from", "left"), [(0, []), (2, [1, 2])])
def test_metrics_start_anew_or_go_on_from_the_checkpoint(resumed_from, left, tmp_path) -> None:
    """Lines after the checkpoint belong to steps that will be taken again."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)))
    callbacks.MetricsFile(path).on_train_begin(None, state(resumed_from), None)
    assert [row["step"] for row in read_metrics(path)] == left


def test_plot_skips_what_is_no_number_and_draws_nothing_from_nothing(tmp_path) -> None:
    callbacks.plot_losses([{"step": 1, "loss": None}, {"step": 2, "train_runtime": 3.0}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    rows = [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    callbacks.plot_losses(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_clock_counts_steps_only() -> None:
    clock = callbacks.Clock()
    clock.on_step_end(None, None, None)
    assert clock.lap() == 0.0
    clock.on_step_begin(None, None, None)
    clock.on_step_end(None, None, None)
    assert clock.lap() > 0.0 and clock.lap() == 0.0


def test_progress_is_a_line_now_and_then_where_stderr_is_no_terminal(capsys) -> None:
    progress = callbacks.ProgressLine()
    progress.on_train_begin(None, state(0, last=60), None)
    logs = {"loss": 1.5, "learning_rate": 1e-4, "tokens_per_second": 1234.0, "memory_gb": 2.0}
    for step in range(1, 7):
        progress.on_log(None, state(step, last=60), None, logs)
    progress.on_log(None, state(7, last=60), None, {"eval_loss": 1.25})
    progress.on_log(None, state(7, last=60), None, {"train_runtime": 1.0})
    progress.on_train_end(None, state(7, last=60), None)
    assert capsys.readouterr().out.splitlines() == [
        "step 3/60: loss 1.5000  lr 1.00e-04  1,234 tokens/s  2.00 GB",
        "step 6/60: loss 1.5000  lr 1.00e-04  1,234 tokens/s  2.00 GB",
        "step 7/60: held-out loss 1.2500",
    ]
