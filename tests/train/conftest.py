"""One tiny NVFP4 base and its data for all runs of this folder."""

from pathlib import Path
from typing import Any

import pytest

from halfbyte.train.config import TrainConfig, build_config
from tests.train import tiny


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """Llama with an lm_head of its own, so that it can be a module to save."""
    return tiny.save_base(tmp_path_factory.mktemp("model") / "base", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    return tiny.write_lines(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny.chat_rows(20))


@pytest.fixture(scope="session")
def settings(base, rows) -> dict[str, Any]:
    """A run of 12 steps over 2.4 epochs of 5 steps, with dropout, accumulation and a module trained in full."""
    return {
        "base_model": str(base),
        "datasets": [str(rows)],
        "sequence_len": 128,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "lora_modules_to_save": ["lm_head"],
        "device": "cpu",
    }


@pytest.fixture(scope="session")
def config(settings):
    """Builds the config of a run in a folder, with changes."""

    def build(output_dir: Path, **changes: Any) -> TrainConfig:
        return build_config({**settings, "output_dir": str(output_dir), **changes})

    return build
