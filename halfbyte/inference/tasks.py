"""lm-eval's tasks on a model of ours, where that package is installed."""

import importlib.util
from typing import Any

from halfbyte.inference.load import Runnable

PACKAGE = "lm_eval"


def check_installed() -> None:
    """ImportError that names the package."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ImportError("--tasks needs the package lm-eval, which is not installed; install it: pip install lm-eval")


def run_tasks(runnable: Runnable, tasks: list[str], *, limit: int | None, batch_size: int) -> dict[str, dict[str, Any]]:
    """Task -> metric -> value, as lm-eval names them.

    limit  examples of each task; None for all.
    """
    check_installed()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=runnable.model, tokenizer=runnable.tokenizer, batch_size=batch_size)
    found = simple_evaluate(model=model, tasks=tasks, limit=limit)
    return {task: dict(metrics) for task, metrics in found["results"].items()}
