"""One line for users of transformers' Trainer and of Accelerate: `halfbyte.parallel.synchronize(model)`."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfbyte.parallel import synchronize
from halfbyte.parallel.digests import content_digests
from tests.dist import run
from tests.parallel.models import batch, loss_of, tiny_lora, trainable
from tests.parallel.training import Case, error, one_process


class Rows(torch.utils.data.Dataset):
    """The micro-batches of `training.py` as rows: row n belongs to step n // 4, its part n // 2 % 2."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = batch(index // 4, index // 2 % 2)[index % 2]
        return {"input_ids": tokens, "labels": tokens}


def train_with_trainer(output_dir: str) -> tuple[dict, list[float], bool]:
    """The user's script: ranks above zero never read the weights."""
    from transformers import Trainer, TrainingArguments

    rank = dist.get_rank()
    model = tiny_lora(adapter_seed=rank, device="meta" if rank else "cpu")
    arguments = TrainingArguments(
        output_dir,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    synchronize(model)
    trainer = Trainer(model, arguments, train_dataset=Rows())
    trainer.train()
    wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    return trainable(model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], wrapped


def test_trainer(tmp_path) -> None:
    expected = one_process(Case(), 2)
    for adapter, losses, wrapped in run(2, train_with_trainer, str(tmp_path)):
        assert wrapped
        assert losses == pytest.approx(expected.losses, rel=1e-4)
        assert error(adapter, expected.adapter) < 1e-5


def train_with_accelerate() -> tuple[dict, dict]:
    from accelerate import Accelerator

    rank = dist.get_rank()
    model = tiny_lora(seed=rank, adapter_seed=rank)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator(cpu=True)
    synchronize(model)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for step in range(5):
        accelerator.backward(loss_of(wrapped, batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return trainable(model), content_digests(model)


def test_accelerate() -> None:
    expected = one_process(Case(), 2)
    (zero, digests), (one, others) = run(2, train_with_accelerate)
    assert error(zero, expected.adapter) < 1e-5 and error(one, expected.adapter) < 1e-5
    assert digests == others
