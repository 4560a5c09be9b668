"""The quantizer against torchao, bit for bit given the same global scale; and where torchao is wrong."""

import pytest
import torch
from torch import Tensor

from halfbyte.nvfp4 import NVFP4Linear, dequantize, global_scale_for, quantize
from halfbyte.nvfp4.format import NVFP4Parts
from halfbyte.nvfp4.quantize import encode

torchao_nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
KINDS = ["random", "ties", "outliers", "tiny", "huge", "zero blocks", "constant", "denormal blocks"]


def weight_of(kind: str, dtype: torch.dtype) -> Tensor:
    """[70, 160], of the kind."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 160, generator=generator)
    if kind == "ties":  # on a power-of-two scale these are grid values and midpoints; 6 and -0 in every block
        weight = torch.randint(-24, 25, (70, 160), generator=generator) * 0.25
        weight[:, ::16], weight[:, 1::16] = 6, -0.0
    elif kind == "outliers":
        weight[torch.rand(70, 160, generator=generator) < 0.01] *= 1000
    elif kind == "tiny":
        weight = weight * 1e-30
    elif kind == "huge":
        weight = weight * 1e37
    elif kind == "zero blocks":
        weight[:, 16:48] = 0
        weight[3] = -0.0
    elif kind == "constant":
        weight = torch.full((70, 160), -0.75)
    elif kind == "denormal blocks":
        weight[::2] *= 1e-38
    return weight.to(dtype)


def by_torchao(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(scale bytes, qdata)"""
    scale, qdata = torchao_nvfp4.nvfp4_quantize(weight, per_tensor_scale=global_scale)
    return scale.view(torch.uint8), qdata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_equal_torchao(kind: str, dtype: torch.dtype) -> None:
    """With our own scale, torchao's scale, and scales that are much too small or large for the weight."""
    weight = weight_of(kind, dtype)
    theirs = torchao_nvfp4.per_tensor_amax_to_scale(weight.abs().amax())
    for global_scale in (global_scale_for(weight.abs().amax()), theirs, theirs * 100, theirs / 7):
        parts = quantize(weight, global_scale=global_scale)
        scale, qdata = by_torchao(weight, global_scale)
        assert torch.equal(parts.qdata, qdata)
        assert torch.equal(parts.scale.view(torch.uint8), scale)


def test_many_ties_with_awkward_scales() -> None:
    """Exact midpoints under scales that are no power of two: the reciprocal decides the side, so its order matters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        global_scale = torch.rand((), generator=generator) * 1e-3 + 1e-5
        step = torch.rand(64, 8, 1, generator=generator).add_(0.01).to(torch.float8_e4m3fn).float() * global_scale
        values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        weight = (values[torch.randint(0, 8, (64, 8, 16), generator=generator)] * step).flatten(1)
        scale, qdata = by_torchao(weight, global_scale)
        parts = quantize(weight, global_scale=global_scale)
        assert torch.equal(parts.qdata, qdata) and torch.equal(parts.scale.view(torch.uint8), scale)


def test_golden_row() -> None:
    """Sixteen known values to fixed bytes (scenario n21): global scale 1/448, block scale 448, so a step of 1."""
    row = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]])
    parts = quantize(row, global_scale=torch.tensor(1 / 448))
    assert parts.qdata.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert parts.scale.view(torch.uint8).tolist() == [[0x7E]]


def test_quantizing_the_decoded_weight_gives_the_codes_again() -> None:
    parts = quantize(weight_of("random", torch.float32))
    again = quantize(dequantize(parts), global_scale=parts.global_scale)
    assert torch.equal(again.qdata, parts.qdata)


def test_strides_and_chunks_do_not_matter() -> None:
    """A transposed view, and enough rows for several chunks."""
    weight = torch.randn(48, 9000)
    parts = quantize(weight.T)
    whole = quantize(weight.T.contiguous())
    rows = quantize(weight.T[8000:8003].contiguous(), global_scale=parts.global_scale)
    assert torch.equal(parts.qdata, whole.qdata) and torch.equal(parts.qdata[8000:8003], rows.qdata)


def test_zeros_give_finite_scales_and_zeros() -> None:
    parts = quantize(torch.zeros(32, 64))
    assert torch.isfinite(parts.scale.float()).all() and torch.isfinite(parts.global_scale)
    assert torch.equal(dequantize(parts), torch.zeros(32, 64))
    assert quantize(torch.zeros(0, 64)).shape == (0, 64)


def test_a_layer_of_zeros_trains() -> None:
    """Scenario n4: the gradient of x is zero, not NaN, and the layer gives its bias."""
    dense = torch.nn.Linear(64, 32)
    torch.nn.init.zeros_(dense.weight)
    x = torch.randn(3, 64, requires_grad=True)
    y = NVFP4Linear.from_linear(dense)(x)
    y.sum().backward()
    assert torch.equal(y, dense.bias.expand(3, 32)) and torch.equal(x.grad, torch.zeros(3, 64))


def test_operator_contract() -> None:
    torch.library.opcheck(encode, (torch.randn(4, 32, dtype=torch.bfloat16), torch.tensor(0.01)))


@pytest.mark.parametrize("scale", [1e-42, 1e-38, 1e-36, 3e38])
def test_the_ends_of_fp32(scale: float) -> None:
    """Weights too small for 1/global_scale to be finite lose precision, and stay finite; the largest are right."""
    weight = (torch.rand(8, 32) + 0.1) * scale
    decoded = dequantize(quantize(weight))
    assert torch.isfinite(decoded).all()
    if scale > 1e-35:
        assert (decoded - weight).abs().max() < 0.2 * scale


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_with_the_name(bad: float) -> None:
    weight = torch.randn(4, 32)
    weight[2, 5] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.3\.up_proj: 1 of 128 values are NaN or infinite"):
        quantize(weight, name="model.layers.3.up_proj")


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="in_features is 24.*divisible by 16"):
        quantize(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="floating-point matrix"):
        quantize(torch.zeros(2, 2, 16))
    with pytest.raises(ValueError, match="floating-point matrix"):
        quantize(torch.zeros(2, 16, dtype=torch.int32))
    with pytest.raises(ValueError, match="four-over-six"):
        quantize(torch.zeros(2, 16), scales="best")
    for global_scale in (0.0, -1.0, float("nan"), float("inf"), 1e-40):
        with pytest.raises(ValueError, match="global_scale is"):
            quantize(torch.zeros(2, 16), global_scale=torch.tensor(global_scale))


def test_one_global_scale_for_the_whole_tensor() -> None:
    for wrong in (torch.ones(2), torch.ones(2, 1), torch.ones(0)):
        with pytest.raises(ValueError, match=r"up: global_scale has shape \[.*\], expected one number"):
            quantize(torch.ones(2, 16), global_scale=wrong, name="up")
    assert quantize(torch.ones(2, 16), global_scale=torch.ones(1)).global_scale.shape == ()


def test_four_over_six_is_never_worse_in_a_block() -> None:
    """Given one global scale with room above it, each block has the smaller of the two errors. arXiv 2512.02010."""
    weight = weight_of("random", torch.float32)
    global_scale = global_scale_for(weight.abs().amax(), scales="four-over-six")

    def block_errors(parts: NVFP4Parts) -> Tensor:
        return (dequantize(parts) - weight).unflatten(-1, (-1, 16)).square().sum(-1)

    plain = block_errors(quantize(weight, global_scale=global_scale))
    adaptive = block_errors(quantize(weight, scales="four-over-six"))
    assert (adaptive <= plain * (1 + 1e-6)).all()
    assert adaptive.sum() < 0.9 * plain.sum()
