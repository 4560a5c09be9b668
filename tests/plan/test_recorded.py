"""The planner against recorded runs, the same in the docs, and against an allocator, here and now."""

import re

import pytest

from benchmarks.peak_memory import CPU_CASES, measured, planned
from halfbyte.plan.linear import linear_stage
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import Linear
from halfbyte.plan.stage import peak
from tests.plan.recorded import H200, RESULTS, ROOT, RUNS, row, table

LIMIT = 0.05


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_within_5_percent_of_every_recorded_run(run) -> None:
    assert run.plan() == pytest.approx(run.measured, rel=LIMIT), row(run)


def test_the_docs_list_the_error_of_every_run() -> None:
    assert table() in (ROOT / "docs" / "planning.md").read_text()


LAYERS = re.findall(
    r"\| (\d+)x(\d+) \| (\d+) \| (dense|nvfp4|fused LoRA|fused LoRA, dropout 0.1|PEFT's order of operations|"
    r"the same over dense bf16|merge-aware, recomputed) \|.* (\d+) \|",
    (RESULTS / H200).read_text(),
)


def test_every_layer_measured_on_a_gpu() -> None:
    """Forward and backward of one layer, in MiB on top of layer and input: 54 rows of two tables."""
    assert len(LAYERS) == 54
    for n, k, tokens, kind, recorded in LAYERS:
        forward = "merge-aware" if "merge" in kind else "peft" if "PEFT" in kind or "same" in kind else "fused"
        settings = Settings(
            sequence_len=int(tokens), forward=forward, autocast=False, lora_dropout=0.1 if "dropout" in kind else 0
        )
        adapted, packed = kind not in ("dense", "nvfp4"), "dense" not in kind
        stage = linear_stage(Linear(kind, int(n), int(k), packed=packed, adapted=adapted), settings)
        found = peak([stage]).size_bytes / 2**20
        assert found == pytest.approx(int(recorded), rel=LIMIT, abs=3), (n, k, tokens, kind, recorded, found)


HERE = (
    "Llama, bf16, checkpointing",
    "Llama, fp32, TRL's loss",
    "Llama, fp32, attention mask",
    "Qwen 3, bf16",
    "Llama, bf16, PEFT's forward, checkpointing",
)


@pytest.mark.parametrize("case", [case for case in CPU_CASES if case.name in HERE], ids=lambda case: case.name)
def test_what_the_allocator_counts(case) -> None:
    """One step of a small model, every allocation of torch's CPU allocator counted."""
    assert planned(case).peak == pytest.approx(measured(case), rel=LIMIT)
