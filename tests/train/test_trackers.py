"""`report_to`: TensorBoard gets the numbers of the metrics file; a tracker that is not installed is said beforehand."""

import importlib.util

import pytest

from halfbyte.train import train
from halfbyte.train.files import METRICS, read_metrics


def test_tensorboard_has_the_numbers_of_the_metrics_file(config, tmp_path) -> None:
    """Read back with TensorBoard's own reader; its floats have 32 bits."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(config(tmp_path / "run", report_to="tensorboard", max_steps=3, val_set_size=4))
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")
    found = events.EventAccumulator(str(file.parent)).Reload()
    rows = read_metrics(tmp_path / "run" / METRICS)
    for tag, key in [
        ("train/loss", "loss"),
        ("train/grad_norm", "grad_norm"),
        ("train/tokens_per_second", "tokens_per_second"),
        ("train/memory_gb", "memory_gb"),
        ("eval/loss", "eval_loss"),
    ]:
        expected = [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows if key in row]
        assert expected and [(event.step, event.value) for event in found.Scalars(tag)] == expected, tag


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(name, config, tmp_path) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    with pytest.raises(ValueError, match=f"report_to: '{name}' needs the package {name}.*pip install {name}"):
        train(config(tmp_path / "run", report_to=[name]))
    assert not (tmp_path / "run").exists()
