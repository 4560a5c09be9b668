"""A tiny base, a run on it that evaluated held-out data, and another base."""

from pathlib import Path

import pytest

from halfbyte.train import train
from halfbyte.train.config import build_config
from tests.train import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("inference") / "base")


@pytest.fixture(scope="session")
def rows(base: Path) -> Path:
    return tiny.write_lines(base.parent / "rows.jsonl", tiny.chat_rows(10))


@pytest.fixture(scope="session")
def result(base: Path, rows: Path):
    """A run of four steps, evaluated on all rows before and after, in batches of three."""
    values = {
        "base_model": str(base),
        "datasets": [str(rows)],
        "test_datasets": [str(rows)],
        "output_dir": str(base.parent / "run"),
        "sequence_len": 40,
        "eval_batch_size": 3,
        "max_steps": 4,
        "learning_rate": 3e-2,
        "lora_r": 4,
        "device": "cpu",
    }
    return train(build_config(values))


@pytest.fixture(scope="session")
def adapter(result) -> Path:
    return result.adapter


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of the same shapes with other weights."""
    return tiny.save_base(tmp_path_factory.mktemp("inference") / "other", seed=1)
