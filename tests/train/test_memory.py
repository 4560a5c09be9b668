"""memory.json's count of optimizer states."""

import torch
from accelerate import Accelerator
from torch import nn

from halfbyte.optim import AdamW8bit
from halfbyte.train.memory import bytes_by_kind


def test_the_optimizer_does_not_take_its_states_for_given_away() -> None:
    """An optimizer whose `state` was read looks at every state's address in every later step, wrapped or not."""
    model = nn.Linear(64, 128)
    optimizer = AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    quantized, plain = 2 * (64 * 128 + 4 * 64 * 128 // 256) + 4, 2 * 4 * 128 + 4  # codes, scales and a step count; bias
    for given in (optimizer, Accelerator(cpu=True).prepare(optimizer)):
        assert bytes_by_kind(model, given)["optimizer"] == quantized + plain
    assert not optimizer._states_seen
    theirs = torch.optim.AdamW(model.parameters())
    theirs.step()
    assert bytes_by_kind(model, theirs)["optimizer"] == 2 * 4 * (64 * 128 + 128) + 2 * 4
