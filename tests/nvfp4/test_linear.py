"""NVFP4Linear: three frozen uint8 parameters that survive whatever is done to a module."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from halfbyte.nvfp4 import NVFP4Linear, dequantize, nvfp4_modules, quantize, replace_module
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.linear import COMPONENTS

AWKWARD_SCALE = 1.0012345  # bf16 and fp16 would round it (scenario n11)


def layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> NVFP4Linear:
    torch.manual_seed(0)
    dense = nn.Linear(48, 24, bias=bias, dtype=dtype)
    return NVFP4Linear.from_linear(dense, global_scale=torch.tensor(AWKWARD_SCALE * 1e-4))


def component_bytes(module: nn.Module) -> list[bytes]:
    return [getattr(module, name).numpy().tobytes() for name in COMPONENTS]


def test_it_is_a_linear_layer_with_three_frozen_byte_tensors() -> None:
    module = layer()
    assert isinstance(module, nn.Linear)
    assert [(n, p.dtype, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()] == [
        ("qdata", torch.uint8, (24, 24), False),
        ("scale", torch.uint8, (24, 3), False),
        ("global_scale", torch.uint8, (4,), False),
        ("bias", torch.float32, (24,), False),
    ]
    assert module.parts().global_scale == torch.tensor(AWKWARD_SCALE * 1e-4)
    assert module.parts().qdata.data_ptr() == module.qdata.data_ptr()


def test_from_linear_quantizes_and_keeps_the_bias() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(48, 24, dtype=torch.bfloat16)
    module = NVFP4Linear.from_linear(dense)
    parts = quantize(dense.weight)
    assert torch.equal(module.qdata, parts.qdata) and torch.equal(module.parts().global_scale, parts.global_scale)
    assert torch.equal(module.bias, dense.bias) and module.dtype == module.weight.dtype == torch.bfloat16


def test_from_parts_shares_memory_and_checks_shapes() -> None:
    parts = quantize(torch.randn(24, 48))
    module = NVFP4Linear.from_parts(parts, dtype=torch.bfloat16, activation=ActivationQuant(0.5))
    assert module.qdata.data_ptr() == parts.qdata.data_ptr() and module.activation == ActivationQuant(0.5)
    with pytest.raises(ValueError, match=r"mlp.up: scale is .*\[24, 2\], expected .*\[24, 3\]"):
        NVFP4Linear.from_parts(parts._replace(scale=parts.scale[:, :2]), dtype=torch.float32, name="mlp.up")


def test_a_new_layer_is_zero() -> None:
    module = NVFP4Linear(32, 8, bias=True)
    assert torch.equal(module(torch.randn(3, 32)), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="divisible by 16"):
        NVFP4Linear(40, 8)
    with pytest.raises(RuntimeError, match="cannot be initialized at random"):
        module.reset_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casting_changes_what_floats_and_no_byte(dtype: torch.dtype) -> None:
    module, expected = layer(), component_bytes(layer())
    cast = nn.Sequential(module).to(dtype)
    assert component_bytes(module) == expected
    assert module.bias.dtype == module.weight.dtype == module.dtype == dtype
    assert cast[0].weight.shape == (24, 48)


def test_every_cast_there_is() -> None:
    module, expected = layer(), component_bytes(layer())
    for cast in ("half", "bfloat16", "float", "double"):
        assert component_bytes(getattr(module, cast)()) == expected
    module.to(torch.bfloat16).requires_grad_(False).eval().train()
    assert component_bytes(module) == expected and module.dtype == torch.bfloat16


def test_meta_deepcopy_and_pickle() -> None:
    module = layer(dtype=torch.bfloat16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert component_bytes(twin) == component_bytes(module) and twin.dtype == torch.bfloat16
        assert twin.qdata.data_ptr() != module.qdata.data_ptr()
    meta = copy.deepcopy(module).to("meta")
    assert meta.weight.device.type == "meta" and meta.weight.dtype == torch.bfloat16
    assert meta(torch.empty(2, 48, device="meta", dtype=torch.bfloat16)).shape == (2, 24)
    meta.to_empty(device="cpu").load_state_dict(module.state_dict())
    assert component_bytes(meta) == component_bytes(module)


@pytest.mark.parametrize("assign", [True, False])
def test_state_dict_round_trip_through_a_file(assign: bool) -> None:
    module, file = layer(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    twin = NVFP4Linear(48, 24, bias=True)
    twin.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert component_bytes(twin) == component_bytes(module) and torch.equal(twin.bias, module.bias)


def test_typed_components_in_a_state_dict_are_refused_not_converted() -> None:
    """copy_ from float8 to uint8 would convert values: 448 becomes 192."""
    state = layer().state_dict()
    state["scale"] = state["scale"].view(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="scale: found torch.float8_e4m3fn, expected the raw bytes"):
        layer().load_state_dict(state)


def test_compiles_whole() -> None:
    """One graph, same numbers as eager; the decoder is an operator of its own."""
    module = layer()
    x = torch.randn(3, 48, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    y.square().sum().backward()
    compiled_grad, x.grad = x.grad, None
    expected = module(x)
    expected.square().sum().backward()
    assert torch.equal(y, expected) and torch.equal(compiled_grad, x.grad)


def test_finding_and_replacing() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(32, 16), nn.ReLU()), "b": nn.Linear(16, 16)})
    dense = replace_module(model, "a.0", NVFP4Linear.from_linear(model["a"][0]))
    assert isinstance(dense, nn.Linear) and list(nvfp4_modules(model)) == ["a.0"]
    replace_module(model, "b", NVFP4Linear(16, 16))
    assert list(nvfp4_modules(model)) == ["a.0", "b"]
    with pytest.raises(AttributeError):
        replace_module(model, "c.0", nn.Identity())


def test_weight_reads_as_the_decoded_weight() -> None:
    module = layer(dtype=torch.bfloat16)
    assert torch.equal(module.weight + 0, dequantize(module.parts(), torch.bfloat16))
