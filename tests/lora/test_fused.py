"""The fused LoRA layer: its numbers against float64, its behaviour against PEFT's layer.

Tolerances. fp32: sums of at most 96 terms, each rounded to 2^-24, so 1e-5 of the result's norm is generous. bf16: each
operand and result is rounded to 2^-9 relative, and t once more between the two small products, so 1e-2 of the norm.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfbyte.lora import fuse
from halfbyte.lora.fused_layer import FusedLoraLinear
from halfbyte.lora.fused_matmul import lora_linear
from halfbyte.lora.snap_adapter import lora_snap
from halfbyte.nvfp4 import NVFP4Linear, dequantize
from halfbyte.nvfp4.dequantize import decode
from halfbyte.nvfp4.frozen_product import frozen_product
from halfbyte.nvfp4.quantize import encode

N, K = 80, 96


class TwoLinears(nn.Module):
    """A biased and a biasless layer of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = NVFP4Linear.from_linear(dense(K, N, True, generator))
        self.down = NVFP4Linear.from_linear(dense(N, K, False, generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def dense(k: int, n: int, bias: bool, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return linear


def peft_model(**config: object) -> PeftModel:
    """Adapters with random B, so that they do something."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["up", "down"], **config}
    model = get_peft_model(TwoLinears(), LoraConfig(**settings))
    randomize(model)
    return model


def randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def num_fused(model: nn.Module) -> int:
    return sum(isinstance(module, FusedLoraLinear) for module in model.modules())


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, of a loss in which each output weighs differently."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() * inputs(*y.shape)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}


def assert_close(found: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype, name
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("r", "shape"), [(1, (1, K)), (4, (17, K)), (16, (2, 5, K)), (3, (K,))], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_against_float64(dtype: torch.dtype, tolerance: float, r: int, shape: tuple[int, ...], bias: bool) -> None:
    layer = NVFP4Linear.from_linear(dense(K, N, bias, torch.Generator().manual_seed(0)))
    lora_A = inputs(r, K).mul_(0.1).requires_grad_()
    lora_B = inputs(N, r).mul_(0.1).requires_grad_()
    x = inputs(*shape, dtype=dtype).requires_grad_()
    components = (layer.qdata, layer.scale, layer.global_scale)
    y = lora_linear(x, lora_A, lora_B, components, layer.bias, scaling=1.7)
    weigh = inputs(*y.shape)
    found = torch.autograd.grad((y.float() * weigh).sum(), (x, lora_A, lora_B))
    assert y.dtype == dtype and y.shape == (*shape[:-1], N)

    exact = [value.detach().double().requires_grad_() for value in (x, lora_A, lora_B)]
    weight = dequantize(layer.parts()).double()
    want = exact[0] @ weight.T + 1.7 * (exact[0] @ exact[1].T) @ exact[2].T
    want = want if layer.bias is None else want + layer.bias.double()
    want_grads = torch.autograd.grad((want * weigh.double()).sum(), exact)
    for mine, theirs in zip((y, *found), (want, *want_grads), strict=True):
        assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()
    assert [grad.dtype for grad in found] == [dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("config", [{}, {"lora_dropout": 0.3}, {"use_rslora": True}], ids=str)
def test_equal_to_peft(config: dict[str, object]) -> None:
    """Same losses and gradients as PEFT's layer, with the same dropout from the same seed."""
    model = peft_model(**config)
    model.train()
    torch.manual_seed(5)
    want = gradients(model, inputs(3, 7, K))
    assert num_fused(fuse(model)) == 2
    torch.manual_seed(5)
    assert_close(gradients(model, inputs(3, 7, K)), want, 1e-5)
    model.eval()
    found = model(inputs(3, 7, K))
    model.base_model.model.up.forward = lambda x: PEFT_FORWARD(model.base_model.model.up, x)
    model.base_model.model.down.forward = lambda x: PEFT_FORWARD(model.base_model.model.down, x)
    torch.testing.assert_close(found, model(inputs(3, 7, K)))


PEFT_FORWARD: Callable[..., Tensor] = FusedLoraLinear.__mro__[1].forward  # type: ignore[attr-defined]


def test_frozen_factors_and_inputs() -> None:
    """Only what requires a gradient gets one."""
    model = peft_model()
    fuse(model)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    model(inputs(5, K)).sum().backward()
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.grad is not None} == {"lora_B"}


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_what_is_kept_for_backward(p: float) -> None:
    """With x in bf16 and factors in fp32: x itself, t, and one byte a value where there is dropout."""
    layer = NVFP4Linear.from_linear(dense(K, N, True, torch.Generator().manual_seed(0)))
    lora_A, lora_B = inputs(4, K).requires_grad_(), inputs(N, 4).requires_grad_()
    x = inputs(32, K, dtype=torch.bfloat16).requires_grad_()
    kept: list[Tensor] = []
    components = (layer.qdata, layer.scale, layer.global_scale)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(x, lora_A, lora_B, components, layer.bias, scaling=1.0, p=p)
    parameters = {t.data_ptr() for t in (*components, lora_A, lora_B)}
    activations = [t for t in kept if t.data_ptr() not in parameters]
    assert [t for t in activations if t.shape == x.shape and t.data_ptr() == x.data_ptr()]
    size = sum(t.numel() * t.element_size() for t in activations)
    assert size == 32 * K * 2 + 32 * 4 * 2 + (32 * K if p else 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = peft_model(lora_dropout=0.2)
    fuse(model)
    torch.manual_seed(6)
    want = gradients(model, inputs(9, K))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    torch.manual_seed(6)
    found = gradients(Checkpointed(), inputs(9, K))
    assert_close({name.removeprefix("inner."): value for name, value in found.items()}, want, 0.0)


def test_autocast() -> None:
    """Products in bf16, the result in x's dtype, gradients in the parameters'."""
    model = peft_model()
    want = gradients(model, inputs(33, K))
    fuse(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(gradients(model, inputs(33, K)), want, 2e-2)


def fused_is_used(model: nn.Module, **kwargs: object) -> bool:
    """Whether a forward of the whole model goes through the fused function in both layers."""
    seen: list[int] = []
    x = inputs(2, K).requires_grad_()
    y = model(x, **kwargs)
    stack, done = [y.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in done:
            continue
        done.add(node)
        seen.append(type(node).__name__ == "LoraMatmulBackward")
        stack.extend(parent for parent, _ in node.next_functions)
    return sum(seen) == 2


def test_disable_switch_delete() -> None:
    """PEFT's switches act on the fused layers as on PEFT's own."""
    model, plain = peft_model(), peft_model()
    for each in (model, plain):
        torch.manual_seed(7)
        each.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["up", "down"], use_rslora=True))
        randomize(each)
    fuse(model)
    x = inputs(4, K)
    for adapter in ("other", "default"):
        for each in (model, plain):
            each.set_adapter(adapter)
        assert fused_is_used(model)
        torch.testing.assert_close(model(x), plain(x))
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        each.base_model.set_adapter(["default", "other"])
    assert not fused_is_used(model)
    assert torch.equal(model(x), plain(x))
    for each in (model, plain):
        each.delete_adapter("default")
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("config", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["up"]}], ids=str)
def test_variants_keep_peft_forward(config: dict[str, object]) -> None:
    model, plain = peft_model(**config), peft_model(**config)
    assert num_fused(fuse(model))
    assert not fused_is_used(model)
    assert torch.equal(model(inputs(4, K)), plain(inputs(4, K)))


def test_hooked_modules_are_called() -> None:
    """An engine that gathers a factor in a hook (ZeRO-3) must see its module called."""
    model = peft_model()
    fuse(model)
    calls: list[nn.Module] = []
    layer = model.base_model.model.up
    handle = layer.lora_A["default"].register_forward_pre_hook(lambda module, args: calls.append(module))
    model(inputs(2, K))
    assert calls == [layer.lora_A["default"]]
    handle.remove()
    assert fused_is_used(model)


def test_save_load_and_identity(tmp_path: Path) -> None:
    """Same keys, same parameters, same files; a second call finds nothing to do; what is saved loads into PEFT."""
    model = peft_model()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    assert num_fused(fuse(model)) == 2
    layers = list(model.modules())
    assert list(fuse(model).modules()) == layers
    assert list(model.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(TwoLinears(), str(tmp_path))
    torch.testing.assert_close(loaded(inputs(4, K)), model(inputs(4, K)))
    assert isinstance(model.unload().up, NVFP4Linear)


def test_dense_layers_stay() -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(K, N)), LoraConfig(r=2, target_modules=["0"]))
    assert num_fused(fuse(model)) == 0


def test_compiles_in_one_graph() -> None:
    """No graph break, the same numbers, and no third graph when the number of rows changes again."""
    model = peft_model()
    fuse(model)
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for rows in (8, 12, 20, 33):
        assert_close(
            {k.removeprefix("_orig_mod."): v for k, v in gradients(compiled, inputs(rows, K)).items()},
            gradients(model, inputs(rows, K)),
            1e-6,
        )
    assert len(graphs) <= 2


def test_operator_contract() -> None:
    layer = NVFP4Linear.from_linear(dense(K, N, False, torch.Generator().manual_seed(0)))
    components = (layer.qdata.data, layer.scale.data, layer.global_scale.data)
    torch.library.opcheck(decode, (*components, torch.bfloat16))
    for shape in [(K,), (5, K), (2, 3, K)]:
        torch.library.opcheck(frozen_product, (inputs(*shape), *components, None))
    torch.library.opcheck(frozen_product, (inputs(5, K), *components, inputs(N)))
    factors = (inputs(4, K), inputs(N, 4))
    torch.library.opcheck(lora_snap, (*components[:2], torch.tensor(1e-3), *factors, 0.5, True, 1 << 60, -(1 << 59)))
    torch.library.opcheck(encode, (inputs(3, K), torch.tensor(1e-3)))
