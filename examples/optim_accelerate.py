"""4-bit AdamW in one's own loop under Accelerate: prepare, accumulate, clip, save_state, load_state.

python examples/optim_accelerate.py OUTPUT            or: accelerate launch examples/optim_accelerate.py OUTPUT
"""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfbyte.optim import AdamW4bit


def prepare(optimizer: type = AdamW4bit, **options: Any) -> tuple:
    """(accelerator, model, optimizer, loader, scheduler) for a small regression."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(64, 64)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=8)
    own = optimizer(model.parameters(), **{"lr": 1e-2, **options})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(own, 100)
    return accelerator, *accelerator.prepare(model, own, loader, scheduler)


def epoch(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> float:
    """Train once over the data; returns the last loss."""
    loss = torch.zeros(())
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    parts = prepare()
    losses = [epoch(*parts) for _ in range(5)]
    parts[0].save_state(sys.argv[1])
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
