"""`halfbyte train` with `tensor_parallel_size`: the run of one process, saved whole, resumed bit for bit.

Ranks of a tensor group see one batch, groups different ones, so a run takes the same examples per step on one process,
on two ranks that cut the model, and on 2 x 2. Only the order of fp32 sums differs; AdamW's eps is 1e-5 for the reason
that tests/parallel/test_tensor_parallel.py gives.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from halfbyte.train.callbacks import METRICS, read_metrics
from halfbyte.train.config import build_config
from halfbyte.train.trainer import train
from tests.dist import run
from tests.parallel.training import error
from tests.train import tiny

EXAMPLES_PER_STEP = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, Any]:
    """Six steps of four examples, of which the second epoch starts in the middle, clipped, evaluated twice."""
    folder = tmp_path_factory.mktemp("tp")
    base = tiny.save_base(folder / "base", tie_word_embeddings=False)
    return {
        "base_model": str(base),
        "datasets": [str(tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16)))],
        "test_datasets": [str(tiny.write_lines(folder / "held_out.jsonl", tiny.chat_rows(7)))],
        "sequence_len": 128,
        "micro_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "lora_r": 4,
        "lora_modules_to_save": ["lm_head"],
        "save_steps": 3,
        "device": "cpu",
    }


def train_rank(settings: dict[str, Any], output_dir: str, degree: int, changes: dict[str, Any] | None = None) -> str:
    """One run on this rank; returns the error, if it was refused."""
    copies = dist.get_world_size() // degree if dist.is_initialized() else 1
    accumulate = EXAMPLES_PER_STEP // settings["micro_batch_size"] // copies
    values = {**settings, "output_dir": output_dir, "gradient_accumulation_steps": accumulate}
    try:
        train(build_config(values | {"tensor_parallel_size": degree} | (changes or {})))
    except (ValueError, RuntimeError) as refused:
        return str(refused)
    return ""


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def metrics(output_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(output_dir / METRICS) if key in row]


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "alone"
    assert train_rank(settings, str(folder), 1) == ""
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def on_two(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    assert run(2, train_rank, settings, str(folder), 2) == ["", ""]
    return folder


def assert_same_run(found: Path, expected: Path) -> None:
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "num_tokens"):
        assert metrics(found, key) == pytest.approx(metrics(expected, key), rel=1e-5), key
    assert error(adapter_of(found / "adapter"), adapter_of(expected / "adapter")) < 1e-5


def test_two_ranks_equal_one(alone, on_two) -> None:
    assert_same_run(on_two, alone)
