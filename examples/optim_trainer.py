"""A full fine-tune with 8-bit AdamW under transformers' Trainer: train, save, resume.

python examples/optim_trainer.py OUTPUT [--resume]        a toy model that learns this file's bytes; seconds on a CPU
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from halfbyte.optim import AdamW8bit


class Bytes(Dataset):
    """Windows of 32 bytes of this file."""

    text = Path(__file__).read_bytes()

    def __len__(self) -> int:
        return len(self.text) - 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        window = torch.tensor(list(self.text[i : i + 32]))
        return {"input_ids": window, "labels": window}


def make_trainer(output: str, optimizer: type = AdamW8bit, max_steps: int = 8, **options: Any) -> Trainer:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2))
    args = TrainingArguments(
        output,
        max_steps=max_steps,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    kwargs = {"lr": 3e-3, **options}
    return Trainer(model, args, train_dataset=Bytes(), optimizer_cls_and_kwargs=(optimizer, kwargs))


if __name__ == "__main__":
    trainer = make_trainer(sys.argv[1])
    trainer.train(resume_from_checkpoint="--resume" in sys.argv)
    print(f"loss {trainer.state.log_history[0]['loss']:.3f} -> {trainer.state.log_history[-2]['loss']:.3f}")
