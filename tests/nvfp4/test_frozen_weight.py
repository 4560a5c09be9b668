"""`.weight` reads like a tensor and refuses every kind of write (scenario n24)."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.nvfp4 import NVFP4Linear
from halfbyte.nvfp4.frozen_weight import FrozenWeight, FrozenWeightError


@pytest.fixture
def layer() -> NVFP4Linear:
    torch.manual_seed(0)
    return NVFP4Linear.from_linear(nn.Linear(32, 16))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    "+=": lambda w: w.__iadd__(1),
    "data +=": lambda w: w.data.__iadd__(1),
    "data =": lambda w: setattr(w, "data", torch.zeros(16, 32)),
    "copy_": lambda w: w.copy_(torch.zeros(16, 32)),
    "item": lambda w: w.__setitem__((0, 0), 1.0),
    "slice": lambda w: w.__setitem__(slice(0, 2), 1.0),
    "mask": lambda w: w.__setitem__(w > 0, 0.0),
    "row": lambda w: w[0].zero_(),
    "view": lambda w: w.view(-1).mul_(2),
    "transposed": lambda w: w.T.mul_(2),
    "chunk": lambda w: w.chunk(2)[1].zero_(),
    "detached": lambda w: w.detach().zero_(),
    "view of data": lambda w: w.data.t().data[0].fill_(1),
    "out=": lambda w: torch.add(torch.zeros(16, 32), 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0),
    "init": lambda w: nn.init.xavier_uniform_(w),
    "set_": lambda w: w.set_(torch.zeros(16, 32)),
    "resize_": lambda w: w.resize_(2, 2),
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad =": lambda w: setattr(w, "requires_grad", True),
}


@pytest.mark.parametrize("no_grad", [True, False])
@pytest.mark.parametrize("write", list(WRITES))
def test_writes_are_refused_with_a_remedy(layer: NVFP4Linear, write: str, no_grad: bool) -> None:
    before = layer.qdata.clone()
    with torch.set_grad_enabled(not no_grad), pytest.raises(FrozenWeightError, match="halfbyte merge"):
        WRITES[write](layer.weight)
    assert torch.equal(layer.qdata, before)


def test_assigning_the_attribute_is_refused(layer: NVFP4Linear) -> None:
    for value in (nn.Parameter(torch.zeros(16, 32)), torch.zeros(16, 32), None):
        with pytest.raises(FrozenWeightError, match="assignment to .weight"):
            layer.weight = value
    assert [name for name, _ in layer.named_parameters()] == ["qdata", "scale", "global_scale", "bias"]


def test_numpy_views_are_read_only(layer: NVFP4Linear) -> None:
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.numpy()[0, 0] = 1


def test_metadata_decodes_nothing() -> None:
    """PEFT asks for device, dtype and shape of every target."""

    def explode() -> Tensor:
        raise AssertionError("decoded")

    weight = FrozenWeight(explode, (4, 8), torch.bfloat16, torch.device("cpu"))
    assert (weight.shape, weight.dtype, weight.device.type, weight.numel()) == ((4, 8), torch.bfloat16, "cpu", 32)
    assert weight.data.shape == weight.detach().shape == (4, 8) and not weight.requires_grad
    assert "decoded from NVFP4" in repr(weight) and weight.size(0) == 4 and weight.element_size() == 2


def test_reads_give_ordinary_tensors(layer: NVFP4Linear) -> None:
    weight = layer.weight
    dense = weight.clone()
    assert type(dense) is Tensor and type(weight.to(torch.float64)) is Tensor
    dense += 1  # a copy is one's own
    x = torch.randn(3, 32, requires_grad=True)
    F.linear(x, weight, layer.bias).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 32))
    assert torch.equal(weight[2:4] * 1, weight.clone()[2:4])
    assert torch.allclose(torch.linalg.svdvals(weight), torch.linalg.svdvals(weight.clone()))
