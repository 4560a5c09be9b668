"""W4A4: codes are torchao's, the product is fp64's up to fp32 accumulation, and the gradient of x is not lost."""

import pytest
import torch
from torch import Tensor, nn

from halfbyte.nvfp4 import ActivationQuant, NVFP4Linear, dequantize
from halfbyte.nvfp4.quantized_matmul import Activations, native_product, quantize_activations, reference_product

N, K = 40, 96
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(scale: float | None = None, bias: bool = True) -> NVFP4Linear:
    torch.manual_seed(0)
    return NVFP4Linear.from_linear(nn.Linear(K, N, bias=bias), activation=ActivationQuant(scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 1e-3])
def test_codes_equal_torchao(scale: float | None, dtype: torch.dtype) -> None:
    """Dynamic and static; an outlier saturates under the static scale."""
    torchao_nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 5] = 100
    theirs = torch.tensor(scale) if scale else torchao_nvfp4.per_tensor_amax_to_scale(x.abs().max())
    block_scale, qdata = torchao_nvfp4.nvfp4_quantize(x, per_tensor_scale=theirs)
    found = quantize_activations(x, scale)
    assert found.tensor_scale == theirs
    assert torch.equal(found.qdata, qdata) and torch.equal(found.scale, block_scale.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 7, 129])
def test_product_against_fp64(rows: int) -> None:
    """Summing K = 2048 exact products in fp32 errs by about 1e-7 of the largest sum; bf16 rounding would give 4e-3."""
    torch.manual_seed(0)
    module = NVFP4Linear.from_linear(nn.Linear(2048, N, bias=False), activation=ActivationQuant())
    x = torch.randn(rows, 2048)
    operand = quantize_activations(x, None).dequantize(torch.float64)
    expected = operand @ dequantize(module.parts()).double().T
    assert (module(x).double() - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_matrices_are_exact_in_bf16(dtype: torch.dtype) -> None:
    """Code times block scale has 6 significant bits: decoding to bf16 and to fp64 gives the same numbers."""
    batch = quantize_activations(torch.randn(9, K).to(dtype), None)
    one = torch.ones(())
    exact = Activations(batch.qdata, batch.scale, one)
    assert torch.equal(exact.dequantize(torch.bfloat16).double(), exact.dequantize(torch.float64))


@pytest.mark.parametrize("scale", [None, 2e-3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (13, K), (0, K), (2, 0, K)])
def test_shapes_dtypes_and_the_straight_through_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float | None
) -> None:
    module = layer(scale)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype == dtype and y.shape == (*shape[:-1], N)
    grad = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(dx, grad @ dequantize(module.parts(), dtype))


def test_it_differs_from_weight_only_by_the_activation_error() -> None:
    module, plain = layer(), layer()
    plain.activation = None
    x = torch.randn(64, K)
    error = (module(x) - plain(x)).norm() / plain(x).norm()
    assert 0.01 < error < 0.2


def test_non_contiguous_input() -> None:
    x = torch.randn(K, 6).T
    assert torch.equal(layer()(x), layer()(x.contiguous()))


def test_zeros_and_what_is_not_finite() -> None:
    """A batch of zeros is no NaN (torchao's is), a NaN is not hidden, and static scales saturate."""
    module = layer(bias=False)
    assert torch.equal(module(torch.zeros(3, K)), torch.zeros(3, N))
    x = torch.randn(3, K)
    x[1, 2] = float("nan")
    assert module(x).isnan().all()
    assert torch.isfinite(layer(1e-4)(torch.full((2, K), 1e30))).all()


def test_autocast_and_saved_tensors() -> None:
    module, saved = layer(), []
    x = torch.randn(5, K, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.float32 and {tensor.dtype for tensor in saved} <= {torch.uint8}
    expected = module(x.detach().bfloat16())
    assert torch.equal(y, expected.float())


def test_compiles_whole() -> None:
    module, x = layer(), torch.randn(5, K, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.equal(y, module(x))
    y.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_native_product_is_accepted_by_pytorch() -> None:
    """On the meta device only: the arguments fit the operator. Its arithmetic needs compute capability 10.0."""
    module = NVFP4Linear.from_linear(nn.Linear(K, 48), activation=ActivationQuant())
    batch = quantize_activations(torch.randn(7, K), None)
    expected = reference_product(batch, module.qdata, module.scale)
    on_meta = Activations(*(component.to("meta") for component in batch))
    out = native_product(on_meta, module.qdata.to("meta"), module.scale.to("meta"))
    assert out.shape == expected.shape and out.dtype == expected.dtype


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_unusable_static_scales_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite and positive"):
        ActivationQuant(scale)
