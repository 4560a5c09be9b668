"""The product and its gradient: right for any input, and keeping nothing but the packed components."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.nvfp4 import NVFP4Linear, dequantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(n: int = 24, k: int = 48, bias: bool = True) -> NVFP4Linear:
    torch.manual_seed(0)
    return NVFP4Linear.from_linear(nn.Linear(k, n, bias=bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 48), (2, 3, 48), (2, 0, 48), (0, 48)])
def test_equals_the_decoded_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Same operations as F.linear on the weight decoded in x's dtype, so equal bits; bias is added after."""
    module = layer()
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = dequantize(module.parts(), dtype)
    y = module(x)
    assert y.dtype == dtype and torch.equal(y, F.linear(x, weight) + module.bias.to(dtype))
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert dx.dtype == dtype and dx.shape == x.shape and torch.equal(dx, grad @ weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_only_floating_inputs(dtype: torch.dtype) -> None:
    """Integers would be multiplied as integers, and give zeros without a word."""
    with pytest.raises(ValueError, match="expected a floating dtype"):
        layer()(torch.ones(2, 48, dtype=dtype))


def test_gradient_in_double() -> None:
    """The decoder's fp32 values are exact in fp64, so gradcheck sees a linear map."""
    module = layer(8, 16).double()
    assert torch.autograd.gradcheck(module, torch.randn(3, 16, dtype=torch.float64, requires_grad=True))


def test_non_contiguous_input_and_gradient() -> None:
    module = layer()
    x = torch.randn(48, 5).T.requires_grad_()
    grad = torch.randn(24, 5).T
    y = module(x)
    (dx,) = torch.autograd.grad(y, x, grad)
    expected = module(x.detach().contiguous())
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, grad.contiguous() @ module.weight)
    module(torch.randn(2, 48).expand(3, 2, 48)).sum()


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_product_and_x_the_output(x_dtype: torch.dtype, autocast: torch.dtype) -> None:
    module = layer()
    x = torch.randn(5, 48, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=autocast):
        y = module(x)
    expected = F.linear(x.detach().to(autocast), dequantize(module.parts(), autocast)) + module.bias.to(autocast)
    assert y.dtype == x_dtype and torch.equal(y, expected.to(x_dtype))
    y.sum().backward()
    assert x.grad.dtype == x_dtype and torch.isfinite(x.grad).all()


def test_only_the_components_are_saved() -> None:
    """No dequantized weight, not even x (a frozen weight's gradient does not need it), lives until backward."""
    module = layer()
    saved: list[Tensor] = []
    x = torch.randn(5, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    assert saved and all(tensor.dtype == torch.uint8 for tensor in saved)
    allowed = {module.qdata.data_ptr(), module.scale.data_ptr(), module.global_scale.data_ptr()}
    assert {tensor.data_ptr() for tensor in saved} <= allowed


def test_no_graph_without_a_gradient() -> None:
    assert not layer()(torch.randn(2, 48)).requires_grad


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_peak_memory_is_one_weight(step: str) -> None:
    """Allocations on the CPU seen by torch's profiler: never more than one decoded weight and the small change
    (chunk temporaries of about 6 MB) beside it. The weight is 32 MB in fp32."""
    module = layer(2048, 4096, bias=False)
    x = torch.randn(1, 4096, requires_grad=True)
    y = module(x)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if step == "forward":
            module(x)
        else:
            y.sum().backward()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    weight = 2048 * 4096 * 4
    assert weight <= peak < 1.3 * weight
