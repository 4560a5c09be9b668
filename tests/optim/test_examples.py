"""The optimizer examples run, learn, and resume exactly; in this process, as importing transformers costs seconds."""

from pathlib import Path

import pytest
import torch

from tests.optim.training import ADAMW

pytest.importorskip("transformers")


@pytest.mark.parametrize("cls", ADAMW)
def test_trainer_trains_saves_and_resumes(cls: type, tmp_path: Path) -> None:
    """o20: eight steps in one go, and four, a fresh Trainer, and four more: the same losses and the same weights."""
    from examples.optim_trainer import make_trainer

    whole = make_trainer(str(tmp_path), cls)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed = make_trainer(str(tmp_path), cls)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [entry["loss"] for entry in resumed.state.log_history if "loss" in entry] == losses
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("cls", ADAMW)
def test_accelerate_saves_and_loads_its_state(cls: type, tmp_path: Path) -> None:
    from examples.optim_accelerate import epoch, prepare

    parts = prepare(cls)
    first = epoch(*parts)
    parts[0].save_state(str(tmp_path))
    losses = [epoch(*parts) for _ in range(3)]
    assert losses[-1] < first
    fresh = prepare(cls)
    fresh[0].load_state(str(tmp_path))
    assert [epoch(*fresh) for _ in range(3)] == losses
