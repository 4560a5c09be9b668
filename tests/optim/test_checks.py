"""What an optimizer refuses: options, parameters, gradients and states."""

import numpy as np
import pytest
import torch
from torch import nn

from halfbyte.optim import Adam8bit, AdamW8bit
from tests.optim.training import params_of, train


@pytest.mark.parametrize(
    "options, word",
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": torch.ones(2)}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"block_size": 0}, "block_size"),
        ({"min_quant_numel": -1}, "min_quant_numel"),
        ({"differentiable": True}, "differentiable"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr is inf, but must be a finite number"),
        ({"lr": torch.tensor(float("inf"))}, "lr"),
        ({"lr": "a"}, "lr is 'a', but must be a finite number"),
        ({"lr": True}, "lr"),
        ({"eps": None}, "eps"),
        ({"betas": 0.9}, "betas is 0.9, but must be two numbers"),
        ({"betas": ("a", 0.9)}, "betas"),
    ],
)
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit])
def test_wrong_options_are_refused(cls: type, options: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        cls(params_of(), **options)


@pytest.mark.parametrize("options", [{"lr": np.float32(1e-3)}, {"betas": [0.9, torch.tensor(0.99)]}, {"lr": 1}])
def test_numbers_of_other_kinds_are_taken(options: dict) -> None:
    train(AdamW8bit(params := params_of(), **options), params, 1)


def test_block_size_cannot_change_under_a_state() -> None:
    """In a new optimizer it can: loading converts."""
    params = params_of([(64, 128)])
    optimizer = AdamW8bit(params)
    train(optimizer, params, 1)
    optimizer.param_groups[0]["block_size"] = 128
    with pytest.raises(ValueError, match=r"block_size is 128, but the state .* has 32 scales, not 64.*Set the old one"):
        train(optimizer, params, 1)
    optimizer.param_groups[0]["block_size"] = 256
    train(optimizer, params, 1)
    other = AdamW8bit(params, block_size=128)
    other.load_state_dict(optimizer.state_dict())
    train(other, params, 1)


def test_unknown_option_is_refused() -> None:
    for cls in (AdamW8bit, Adam8bit):
        with pytest.raises(TypeError, match="blocksize"):
            cls(params_of(), blocksize=64)


def test_complex_and_sparse_are_refused() -> None:
    """o23"""
    with pytest.raises(ValueError, match="view_as_real"):
        AdamW8bit([nn.Parameter(torch.zeros(8, dtype=torch.complex64))])
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW8bit(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = AdamW8bit(params_of())
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": params_of([(3,)]), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    train(optimizer, optimizer.param_groups[0]["params"], 1)


@pytest.mark.parametrize("name, other", [("exp_avg", torch.zeros(7, dtype=torch.uint8)), ("step", torch.zeros(2))])
def test_a_state_resized_by_hand_is_refused(name: str, other: torch.Tensor) -> None:
    """The fast kernels go by addresses; on the plain path torch itself would complain."""
    params = params_of([(64, 128)])
    optimizer = AdamW8bit(params)
    train(optimizer, params, 1)
    optimizer.state[params[0]][name] = other
    with pytest.raises(RuntimeError, match="load_state_dict|size|Scalar|scalar"):
        train(optimizer, params, 1)


def test_tensors_without_memory_of_their_own() -> None:
    """A gradient still on its way is waited for; other wrappers are refused by name, since the step goes by address."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.testing._internal.two_tensor import TwoTensor

    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    optimizers = [AdamW8bit([param], min_quant_numel=0) for param in params]
    grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        params[0].grad, params[1].grad = grad.clone(), AsyncCollectiveTensor(grad.clone())
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(*params)
    params[0].grad = TwoTensor(grad, grad)
    with pytest.raises(ValueError, match=r"gradient of a parameter of shape \[64, 64\] is a TwoTensor"):
        optimizers[0].step()
    with pytest.raises(ValueError, match=r"trainable parameter of shape \[64, 64\] is a TwoTensor"):
        AdamW8bit([nn.Parameter(TwoTensor(grad, grad))])
