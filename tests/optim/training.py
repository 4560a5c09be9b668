"""Small problems that several optimizer tests train on."""

import torch
from torch import Tensor, nn

from halfbyte.optim import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8

ADAMW = [AdamW8bit, AdamW4bit, AdamWFp8]
ALL = [*ADAMW, Adam8bit, Adam4bit, AdamFp8]
SHAPES = [(64, 128), (33, 100), (5000,), (17,), (), (8, 6, 3, 3), (4097,)]


def params_of(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Random parameters, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_grads(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """Random gradients that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 3, seed: int = 0) -> None:
    for step in range(steps):
        give_grads(params, seed + step)
        optimizer.step()


def states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Whether two optimizers over like parameters hold the same states, bit for bit."""
    for left, right in zip(_states(a), _states(b), strict=True):
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]]
