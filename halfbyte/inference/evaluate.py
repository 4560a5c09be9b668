"""Held-out loss, by the very code that evaluates during training: same encoding, same batches, same sums.

So `halfbyte eval` gives the number that the run reported. A loop of its own would be shorter, and would differ in the
last digits: the trainer's loss comes from TRL's output layer, and is summed batch by batch.
"""

import math
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.inference.load import Runnable
from halfbyte.train.build import trainer_arguments
from halfbyte.train.config import DatasetConfig, TrainConfig, build_config
from halfbyte.train.data import Data, load_data


@dataclass(frozen=True)
class HeldOut:
    """Loss in nats a token, over `tokens` predicted ones of `examples`; num_cut were cut at the sequence length."""

    name: str
    loss: float
    examples: int
    tokens: int
    num_cut: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluation_config(sources: list[DatasetConfig], *, sequence_len: int, batch_size: int, device: str) -> TrainConfig:
    """A run's config with nothing in it but what an evaluation reads."""
    return build_config(
        {
            "base_model": "-",
            "datasets": sources,
            "sequence_len": sequence_len,
            "micro_batch_size": batch_size,
            "device": device,
            "output_dir": "-",
        },
        source="eval",
    )


def held_out(runnable: Runnable, config: TrainConfig) -> list[HeldOut]:
    """The loss of a model; with an adapter, of its base and of both.

    raises  ValueError or FileNotFoundError as for training data.
    """
    data = load_data(config, runnable.tokenizer)
    trainer = evaluating_trainer(runnable, config, data)
    found = []
    for adapter in (False, True) if runnable.with_adapter else (True,):
        off = runnable.with_adapter and not adapter
        name = "base" if off else runnable.name
        with runnable.model.disable_adapter() if off else nullcontext():
            loss = trainer.evaluate()["eval_loss"]
        found.append(HeldOut(name, loss, len(data.train), predicted_tokens(data.train), data.num_cut))
    return found


def evaluating_trainer(runnable: Runnable, config: TrainConfig, data: Data) -> Any:
    """The run's own trainer over this data, silent and in a folder that is gone afterwards."""
    from transformers import PrinterCallback

    from halfbyte.lora.metadata import AdapterMetadata
    from halfbyte.train.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer_arguments(
            config.model_copy(update={"output_dir": str(Path(folder))}), evaluates=True, resuming=True
        )
        trainer = Trainer(
            model=runnable.model,
            args=arguments,
            train_dataset=data.train,
            eval_dataset=data.train,
            processing_class=runnable.tokenizer,
            run={},
            described=AdapterMetadata(),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def predicted_tokens(rows: Any) -> int:
    """Labels that are predicted: all but ignored ones, and never the first."""
    from halfbyte.train.encode import IGNORED

    return sum(label != IGNORED for labels in rows["labels"] for label in labels[1:])
