"""The plain step against torch's own AdamW, on states that are not quantized, and the codes it stores."""

import pytest
import torch
from torch import Tensor

from halfbyte.optim.formats import FORMATS, StateFormat
from halfbyte.optim.hyper import Hyper
from halfbyte.optim.kernels.step import step
from halfbyte.optim.kernels.step_ref import step as step_ref
from halfbyte.optim.state_ops import dequantize


def fresh_state(param: Tensor, fmt: StateFormat | None, amsgrad: bool = False) -> dict[str, Tensor]:
    state = {"step": torch.zeros(())}
    for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())):
        if fmt is None:
            state[name] = torch.zeros(param.shape)
        else:
            state[name] = torch.zeros(fmt.num_bytes(param.numel()), dtype=torch.uint8)
            state[name + "_scale"] = torch.zeros(fmt.num_blocks(param.numel()))
    return state


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_unquantized_is_torchs(decoupled: bool, amsgrad: bool, maximize: bool) -> None:
    """Same formula in the same order; only the association of lr and bias correction differs: a few fp32 ulp."""
    torch.manual_seed(0)
    param = torch.randn(33, 65)
    other = param.clone().requires_grad_()
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": amsgrad}
    peer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([other], maximize=maximize, **options)
    state = fresh_state(param, None, amsgrad)
    hyper = Hyper(1e-2, 0.8, 0.99, 1e-6, 0.1, decoupled=decoupled, maximize=maximize, amsgrad=amsgrad)
    for _ in range(10):
        grad = torch.randn_like(param)
        other.grad = grad.clone()
        peer.step()
        step([param], [grad], [state], hyper, FORMATS["8bit"], cache={}, path=None)
    torch.testing.assert_close(param, other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numel", [1, 17, 4097, 70001])
def test_first_step_is_exact_and_codes_hold_its_moments(name: str, numel: int) -> None:
    """A fresh state is exactly zero, so the first update is fp32 AdamW's; afterwards the state holds its moments."""
    torch.manual_seed(0)
    fmt = FORMATS[name]
    param, grad = torch.randn(numel), torch.randn(numel)
    other = param.clone().requires_grad_()
    other.grad = grad.clone()
    torch.optim.AdamW([other], lr=1e-3).step()
    state = fresh_state(param, fmt)
    step_ref([param], [grad], [state], Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2), fmt)
    torch.testing.assert_close(param, other.detach(), rtol=1e-5, atol=1e-7)
    assert state["step"] == 1
    exp_avg = dequantize(state["exp_avg"], state["exp_avg_scale"], fmt, numel, signed=True)
    tolerance = 0.13 if name == "4bit" else 0.04  # half a step of the coarsest code, as a share of the block's amax
    assert ((exp_avg - 0.1 * grad).abs() <= tolerance * 0.1 * grad.abs().max()).all()


@pytest.mark.parametrize("name", FORMATS)
def test_found_inf_and_grad_scale(name: str) -> None:
    fmt, hyper = FORMATS[name], Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2)
    grad = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    scaled, plain = torch.zeros(5000), torch.zeros(5000)
    scaled_state, plain_state = fresh_state(scaled, fmt), fresh_state(plain, fmt)
    before = {key: value.clone() for key, value in scaled_state.items()}
    step_ref([scaled], [grad * torch.inf], [scaled_state], hyper, fmt, found_inf=torch.ones(1))
    assert (scaled == 0).all() and all(torch.equal(before[key], scaled_state[key]) for key in before)
    scale, fine = torch.tensor([1024.0]), torch.zeros(1)
    step_ref([scaled], [grad * 1024], [scaled_state], hyper, fmt, grad_scale=scale, found_inf=fine)
    step_ref([plain], [grad], [plain_state], hyper, fmt)
    assert torch.equal(scaled, plain) and torch.equal(scaled_state["exp_avg_sq"], plain_state["exp_avg_sq"])


@pytest.mark.parametrize("name", FORMATS)
def test_tensors_that_are_not_contiguous(name: str) -> None:
    """Channels-last and strided views step like their contiguous copies: blocks follow the logical order."""
    fmt, hyper = FORMATS[name], Hyper(1e-3, 0.9, 0.999, 1e-8, 1e-2)
    base = torch.randn(8, 6, 10, 10)
    grad = torch.randn_like(base)
    storage = torch.randn(16, 6, 10, 10)
    storage[::2] = base
    views = [base.clone().to(memory_format=torch.channels_last), storage[::2]]
    states = [fresh_state(base, fmt) for _ in range(3)]
    expected = base.clone()
    step_ref([expected], [grad], [states[0]], hyper, fmt)
    step(views, [grad, grad.to(memory_format=torch.channels_last)], states[1:], hyper, fmt, cache={})
    for view in views:
        torch.testing.assert_close(view.contiguous(), expected, rtol=1e-6, atol=1e-6)
