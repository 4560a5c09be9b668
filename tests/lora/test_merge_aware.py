"""Merge-aware LoRA: what it computes with is what a merge writes, its gradients are those of that product."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from halfbyte.lora import (
    fuse,
    make_merge_aware,
    merged_digest,
    merged_parts,
    merged_weights,
    set_merge_aware,
    start_step,
)
from halfbyte.lora.merge_aware import merge_aware_layers, quantizer_of
from halfbyte.nvfp4 import ActivationQuant, NVFP4Linear, dequantize, nvfp4_modules, replace_module
from halfbyte.nvfp4.digest import model_digest, weight_digest
from tests.lora.models import base_bytes, fill, gradients, nvfp4_llama, nvfp4_mlp, with_lora

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
ACTIVATIONS = [None, ActivationQuant(), ActivationQuant(2e-3)]
MODES = [("dither", "keep"), ("nearest", "fresh"), ("dither", "fresh"), ("nearest", "keep")]


def merge_aware_mlp(activation: ActivationQuant | None = None, bias: bool = True, **settings: Any) -> Any:
    options = {key: settings.pop(key) for key in ("rounding", "scales", "seed", "cache", "active") if key in settings}
    return make_merge_aware(with_lora(nvfp4_mlp(activation, bias=bias), **settings), **options)


def served(model: nn.Module) -> nn.Module:
    """What a server would load: the base with the merged weights, and no adapter."""
    base = copy.deepcopy(model).unload()
    for name, parts in merged_weights(model):
        old = base.get_submodule(name)
        layer = NVFP4Linear.from_parts(parts, old.bias, dtype=old.dtype, activation=old.activation)
        replace_module(base, name, layer)
    return base


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rounding, scales", MODES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_merged_model(
    activation: ActivationQuant | None, rounding: str, scales: str, bias: bool
) -> None:
    """Bit for bit, for biased and biasless layers; and the bytes are those of merged_parts on the factors."""
    model = merge_aware_mlp(activation, bias, rounding=rounding, scales=scales, seed=7, use_rslora=True)
    assert torch.equal(model(X), served(model)(X))
    layer = model.base_model.model.up
    assert layer.scaling["default"] == 8 / 4**0.5
    by_hand = merged_parts(
        layer.base_layer.parts(),
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        layer.scaling["default"],
        name="up",
        seed=7,
        rounding=rounding,
        scales=scales,
    )
    assert weight_digest(dict(merged_weights(model))["up"]) == weight_digest(by_hand)


def test_an_untrained_adapter_is_the_base() -> None:
    model = make_merge_aware(with_lora(nvfp4_mlp(), trained=False))
    assert torch.equal(model(X), nvfp4_mlp()(X))
    base = {
        name: (layer.parts().shape, weight_digest(layer.parts())) for name, layer in nvfp4_modules(nvfp4_mlp()).items()
    }
    assert merged_digest(model) == model_digest(base)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS[:2])
def test_gradients_against_the_formulas(activation: ActivationQuant | None, cache: bool) -> None:
    """One layer, in fp64 by hand: dW' = g^T x (x quantized where the layer quantizes it), dA and dB its projections,
    dx = g W'. fp32 products over at most 64 terms: relative error 1e-5 is generous."""
    model = merge_aware_mlp(activation, cache=cache)
    layer = model.base_model.model.up
    x = X.clone().requires_grad_()
    y = layer(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(g)
    A, B = layer.lora_A["default"].weight.detach().double(), layer.lora_B["default"].weight.detach().double()
    operand = X.double()
    if activation is not None:
        from halfbyte.nvfp4.quantized_matmul import quantize_activations

        operand = quantize_activations(X, None).dequantize(torch.float64)
    grad_W = g.double().T @ operand
    scaling = layer.scaling["default"]
    expected = {
        "dA": (scaling * B.T @ grad_W, layer.lora_A["default"].weight.grad),
        "dB": (scaling * grad_W @ A.T, layer.lora_B["default"].weight.grad),
        "dx": (g.double() @ dequantize(layer.merged_weight()).double(), x.grad),
    }
    for name, (wanted, found) in expected.items():
        assert (found.double() - wanted).norm() < 1e-5 * wanted.norm(), name


def test_it_trains_and_stays_what_it_serves() -> None:
    """Thirty steps: the loss falls, no base byte moves, and the served model has the trained loss at every step."""
    model, target = merge_aware_mlp(trained=False), torch.randn(5, 8, generator=torch.Generator().manual_seed(5))
    before, losses = base_bytes(model), []
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(30):
        loss = (model(X) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and base_bytes(model) == before
    assert torch.equal(model(X), served(model)(X))


CHANGES = {
    "in place": lambda p: p.add_(1e-2),
    "through data": lambda p: p.data.mul_(1.1),
    "data replaced": lambda p: setattr(p, "data", p.data * 1.1),
    "through numpy": lambda p: p.detach().numpy().__imul__(1.1),
}


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_any_change_of_a_factor_is_seen(change: str, factor: str) -> None:
    """The kept W' is compared by value: a version counter would miss two of these."""
    model = merge_aware_mlp(cache=True)
    before = model(X)
    kept = model.base_model.model.up.kept
    assert torch.equal(model(X), before) and model.base_model.model.up.kept is kept
    with torch.no_grad():
        CHANGES[change](getattr(model.base_model.model.up, factor)["default"].weight)
    changed = model(X)
    assert not torch.equal(changed, before) and torch.equal(changed, served(model)(X))


def test_the_kept_weight_follows_scaling_and_base() -> None:
    model = merge_aware_mlp(cache=True)
    layer = model.base_model.model.up
    model(X)
    layer.scale_layer(2.0)
    assert torch.equal(model(X), served(model)(X))
    with torch.no_grad():
        layer.base_layer.qdata.copy_(layer.base_layer.qdata.flip(0))
    assert torch.equal(model(X), served(model)(X))


def test_kept_and_recomputed_weights_give_equal_steps() -> None:
    """Accumulation over two micro-batches, gradients bit for bit; and the kept bytes are half a byte a weight."""
    found = []
    for cache in (True, False):
        model = merge_aware_mlp(cache=cache)
        for part in (X[:2], X[2:]):
            model(part).square().sum().backward()
        found.append(gradients(model))
        kept = model.base_model.model.up.kept
        assert (kept is not None) == cache
        if kept is not None:
            assert kept.components[0].numel() == 32 * 64 // 2
            assert kept.components[1].data_ptr() == model.base_model.model.up.base_layer.scale.data_ptr()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("cache, expected", [(True, [1, 0, 1]), (False, [4, 4, 4])])
def test_the_merged_weight_is_computed_once_a_step(
    cache: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merges of one layer: in a step of two micro-batches (forward and backward of each), in another over the same
    factors, and after an optimizer step."""
    from halfbyte.lora import merge_aware_layer, merge_aware_matmul

    names: list[str] = []

    def counted(parts: Any, lora_A: Tensor, lora_B: Tensor, scaling: float, recipe: Any) -> Any:
        names.append(recipe.name)
        return merge(parts, lora_A, lora_B, scaling, recipe)

    merge = merge_aware_layer.merge
    monkeypatch.setattr(merge_aware_layer, "merge", counted)
    monkeypatch.setattr(merge_aware_matmul, "merge", counted)
    model = merge_aware_mlp(cache=cache)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        for part in (X[:2], X[2:]):
            model(part.clone().requires_grad_()).square().sum().backward()
        found.append(names.count("up"))
        names.clear()
        if step == 1:
            optimizer.step()
    assert found == expected


@pytest.mark.parametrize("cache", [True, False])
def test_saved_tensors_are_x_factors_and_bytes(cache: bool) -> None:
    layer, saved = merge_aware_mlp(cache=cache).base_model.model.up, []
    x = X.clone().requires_grad_()

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        layer(x)
    floats = [tensor for tensor in saved if tensor.is_floating_point()]
    factors = layer.factors("default")
    assert {tensor.data_ptr() for tensor in floats} <= {x.data_ptr(), factors[0].data_ptr(), factors[1].data_ptr()}
    assert all(tensor.dtype == torch.uint8 for tensor in saved if not tensor.is_floating_point())


@pytest.mark.parametrize("cache", [True, False])
def test_no_gradient_of_the_weight_ever_exists(cache: bool) -> None:
    """Peak of torch's own CPU allocations over forward and backward of one layer of 32 MB in fp32: one decoded weight,
    its packed bytes and 7 MB of temporaries; a weight gradient, or a bf16 copy of W', would be half a weight more."""
    torch.manual_seed(0)
    base = NVFP4Linear.from_linear(nn.Linear(2048, 4096, bias=False))
    model = with_lora(nn.ModuleDict({"up": base, "down": nn.Identity()}), target_modules=["up"])
    layer = make_merge_aware(model, cache=cache).base_model.model["up"]
    x = torch.randn(4, 2048, requires_grad=True)
    layer(x).sum().backward()  # compiles, fills the cache
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    weight = 2048 * 4096 * 4
    assert weight <= peak < 1.4 * weight


def test_dropout_goes_beside_the_rounded_term() -> None:
    """In training y = x W'^T + s B A (drop(x) - x); in evaluation dropout is absent. The mask is the generator's."""
    model = merge_aware_mlp(lora_dropout=0.5)
    layer = model.base_model.model.up.train()
    torch.manual_seed(9)
    y = layer(X)
    torch.manual_seed(9)
    dropped = nn.functional.dropout(X, 0.5)
    A, B, scaling = layer.factors("default")
    expected = nn.functional.linear(X, dequantize(layer.merged_weight()), layer.base_layer.bias)
    torch.testing.assert_close(y, expected + (dropped - X) @ A.T @ B.T * scaling)
    assert torch.equal(layer.eval()(X), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    """Output in x's dtype; factors in fp32 get fp32 gradients near those of an fp32 run (8 bits: 2%)."""
    reference = merge_aware_mlp().base_model.model.up
    reference(X).square().sum().backward()
    layer = merge_aware_mlp().base_model.model.up
    y = layer(X.to(dtype))
    assert y.dtype == dtype
    y.float().square().sum().backward()
    cast = merge_aware_mlp().base_model.model.up
    with torch.autocast("cpu", dtype=dtype):
        y = cast(X)
    assert y.dtype == torch.float32
    y.square().sum().backward()
    for other in (layer, cast):
        for wanted, found in zip(reference.factors("default")[:2], other.factors("default")[:2], strict=True):
            assert found.grad.dtype == torch.float32
            assert (found.grad - wanted.grad).norm() < 0.02 * wanted.grad.norm()


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (0, 32)])
def test_leading_shapes(shape: tuple[int, ...]) -> None:
    layer = merge_aware_mlp(ActivationQuant()).base_model.model.up
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 64) and x.grad.shape == x.shape


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    tokens, found = torch.arange(16).reshape(2, 8), []
    for checkpointing in (False, True):
        model = make_merge_aware(with_lora(nvfp4_llama(), target_modules="all-linear")).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert len(found[0]) == 28 and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("cache", [True, False])
def test_a_compiled_model_runs_the_layer_as_it_is(cache: bool) -> None:
    found = []
    for compiled in (False, True):
        model = merge_aware_mlp(cache=cache)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(X).square().sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_start_step_and_switching() -> None:
    model, plain = merge_aware_mlp(active=False), fuse(with_lora(nvfp4_mlp()))
    assert torch.equal(model(X), plain(X))
    set_merge_aware(model, True)
    assert torch.equal(model(X), served(model)(X)) and not torch.equal(model(X), plain(X))
    set_merge_aware(model, False)
    assert torch.equal(model(X), plain(X))
    assert (start_step(10, 100), start_step(0.25, 100), start_step(0.0, 7), start_step(1.0, 7)) == (10, 25, 0, 7)
    for bad in (-1, -0.5, 1.5):
        with pytest.raises(ValueError, match="merge_aware_start_step"):
            start_step(bad, 100)
    with pytest.raises(ValueError, match="no merge-aware layer"):
        set_merge_aware(plain, True)


def test_it_stays_an_ordinary_peft_model(tmp_path: Path) -> None:
    """Save and load by PEFT, disable, copy and pickle."""
    model = merge_aware_mlp(seed=3)
    with model.disable_adapter():
        assert torch.equal(model(X), nvfp4_mlp()(X))
    expected = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), expected)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(nvfp4_mlp(), str(tmp_path))
    torch.testing.assert_close(loaded(X), with_lora(nvfp4_mlp())(X))
    assert torch.equal(make_merge_aware(loaded, seed=3)(X), expected)
    assert quantizer_of(loaded).seed == 3 and list(merge_aware_layers(loaded)) == ["up", "down"]
    assert torch.equal(model.unload()(X), nvfp4_mlp()(X))


def test_again_with_other_settings() -> None:
    model = merge_aware_mlp(seed=1)
    first = merged_digest(model)
    assert merged_digest(make_merge_aware(model, seed=2)) != first
    assert merged_digest(make_merge_aware(model, seed=1)) == first


def test_lora_over_a_dense_layer_stays_plain() -> None:
    model = merge_aware_mlp(target_modules=["up", "head"])
    assert list(merge_aware_layers(model)) == ["up"]
    fill(model)
    assert torch.isfinite(model(X)).all()
