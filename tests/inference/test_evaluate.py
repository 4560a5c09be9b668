"""`halfbyte eval` gives the number that the run reported."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from halfbyte.inference import tasks
from halfbyte.inference.evaluate import evaluation_config, held_out
from halfbyte.inference.load import load_runnable
from halfbyte.train.config import DatasetConfig


def config_of(rows, **changes):
    values = {"sequence_len": 40, "batch_size": 3, "device": "cpu", **changes}
    return evaluation_config([DatasetConfig(path=str(rows))], **values)


def test_equal_to_the_runs_own_evaluation(base, adapter, rows, result) -> None:
    """The adapter's loss to the last bit; the base's too, where the run had an adapter of zeros on it."""
    before, after = held_out(load_runnable(str(base), str(adapter), device="cpu"), config_of(rows))
    assert after.loss == result.loss_after
    assert before.loss == pytest.approx(result.loss_before, rel=1e-6)
    assert after.loss < before.loss and after.perplexity < before.perplexity
    assert (before.name, after.name) == ("base", str(adapter)) and after.examples == 10 and after.tokens > 10


def test_the_base_alone_and_other_batches(base, rows, result) -> None:
    """Per token, so batches change only the order of sums; cut examples are counted."""
    (alone,) = held_out(load_runnable(str(base), device="cpu"), config_of(rows, batch_size=10))
    assert alone.loss == pytest.approx(result.loss_before, rel=1e-6)
    (cut,) = held_out(load_runnable(str(base), device="cpu"), config_of(rows, sequence_len=34))
    assert cut.num_cut > 0 and cut.tokens < alone.tokens


def test_a_dense_model(base, rows) -> None:
    (found,) = held_out(load_runnable(str(base.with_name("base-dense")), device="cpu"), config_of(rows))
    assert 3 < found.loss < 9


def test_tasks_are_handed_to_lm_eval(base, monkeypatch) -> None:
    """A stand-in with lm-eval's names: what it is given, and what comes back."""
    given = {}

    def simple_evaluate(**kwargs):
        given.update(kwargs)
        return {"results": {"arc": {"acc,none": 0.5}}}

    package, models, huggingface = (ModuleType(f"lm_eval{part}") for part in ("", ".models", ".models.huggingface"))
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    huggingface.HFLM = lambda **kwargs: SimpleNamespace(**kwargs)  # type: ignore[attr-defined]
    for module in (package, models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tasks, "check_installed", lambda: None)
    runnable = load_runnable(str(base), device="cpu")
    assert tasks.run_tasks(runnable, ["arc"], limit=7, batch_size=2) == {"arc": {"acc,none": 0.5}}
    assert given["tasks"] == ["arc"] and given["limit"] == 7
    assert given["model"].pretrained is runnable.model and given["model"].batch_size == 2
