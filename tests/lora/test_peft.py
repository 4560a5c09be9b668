"""PEFT over NVFP4 layers: every way to attach is equal (n5), and nothing writes into the decoded weight (n24)."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from packaging import version
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from halfbyte.nvfp4 import NVFP4Linear, dequantize
from halfbyte.nvfp4.frozen_weight import FrozenWeightError
from tests.lora.models import Mlp, base_bytes, fill, gradients, nvfp4_llama, nvfp4_mlp, with_lora

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))


def dense_copy(model: nn.Module) -> nn.Module:
    """The Mlp with the decoded weights."""
    dense = Mlp()
    for name in ("up", "down", "head"):
        layer, twin = model.get_submodule(name), dense.get_submodule(name)
        weight = dequantize(layer.parts()) if isinstance(layer, NVFP4Linear) else layer.weight
        twin.weight.data.copy_(weight)
        twin.bias.data.copy_(layer.bias)
    return dense


def test_every_way_to_attach_gives_the_same_outputs(tmp_path: Path) -> None:
    saved = with_lora(nvfp4_mlp())
    saved.save_pretrained(tmp_path)
    expected = saved(X)
    config = LoraConfig.from_pretrained(str(tmp_path))
    loaded = PeftModel.from_pretrained(nvfp4_mlp(), str(tmp_path))
    added = get_peft_model(nvfp4_mlp(), LoraConfig(r=2, target_modules=["up"]), adapter_name="other")
    added.load_adapter(str(tmp_path), "default")
    added.set_adapter("default")
    created = get_peft_model(nvfp4_mlp(), LoraConfig(r=2, target_modules=["up"]), adapter_name="other")
    created.add_adapter("default", config)
    created.set_adapter("default")
    fresh = inject_adapter_in_model(config, nvfp4_mlp())
    for model in (created, fresh):
        copy_adapter(saved, model)
    dense = PeftModel.from_pretrained(dense_copy(nvfp4_mlp()), str(tmp_path))
    for model in (loaded, added, created, fresh):
        assert torch.equal(model(X), expected)
    torch.testing.assert_close(dense(X), expected)


def copy_adapter(source: nn.Module, target: nn.Module) -> None:
    """Factors of the adapter "default", whatever stands before the layers' names."""
    values = {name.split("model.")[-1]: p for name, p in source.named_parameters() if "lora_" in name}
    for name, parameter in target.named_parameters():
        if ".default." in name:
            parameter.data.copy_(values[name.split("model.")[-1]])


def test_transformers_add_adapter() -> None:
    """`model.add_adapter` of transformers, against get_peft_model; 5.24 asks for a PEFT not out yet."""
    if version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION):
        pytest.skip(f"transformers wants PEFT {MIN_PEFT_VERSION}, found {peft.__version__}")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    tokens = torch.arange(8).unsqueeze(0)
    torch.manual_seed(1)
    wrapped = get_peft_model(nvfp4_llama(), config)
    torch.manual_seed(1)
    added = nvfp4_llama()
    added.add_adapter(config, adapter_name="default")
    for model in (wrapped, added):
        fill(model)
    assert torch.equal(wrapped(tokens).logits, added(tokens).logits)


def test_training_equals_training_over_the_decoded_weights() -> None:
    """Three SGD steps, losses and factors: the same function, so the same numbers to fp32 rounding."""
    models = [with_lora(nvfp4_mlp()), with_lora(dense_copy(nvfp4_mlp()))]
    before = base_bytes(models[0])
    losses: list[list[float]] = [[], []]
    for model, record in zip(models, losses, strict=True):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]
    assert base_bytes(models[0]) == before


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    """Scenario n18: the same non-zero gradients as without, with frozen embeddings (the input needs a gradient)."""
    tokens = torch.arange(16).reshape(2, 8)
    found = []
    for checkpointing in (False, True):
        model = with_lora(nvfp4_llama(), target_modules="all-linear").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 28
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0 and torch.equal(gradient, found[1][name]), name


MERGES: dict[str, Callable[[Any], object]] = {
    "merge_adapter": lambda m: m.merge_adapter(),
    "merge_adapter, safe": lambda m: m.merge_adapter(safe_merge=True),
    "merge_and_unload": lambda m: m.merge_and_unload(),
    "merge_and_unload, safe": lambda m: m.merge_and_unload(safe_merge=True),
}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("merge", list(MERGES))
def test_merging_in_memory_is_refused(merge: str, dora: bool) -> None:
    """And leaves the model as it was: the adapter still works."""
    model = with_lora(nvfp4_mlp(), use_dora=dora)
    expected = model(X)
    with pytest.raises(FrozenWeightError, match="use `halfbyte merge`"):
        MERGES[merge](model)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initializations_that_rewrite_the_base_are_refused(
    init: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nvfp4_mlp(dtype=dtype)
    settings: dict[str, Any] = {}
    if init == "corda":
        for name in ("up", "down"):  # what preprocess_corda leaves behind
            layer = model.get_submodule(name)
            n, k = layer.weight.shape
            layer.eigens = corda_eigens(n, k, 4)
    if init == "loftq":
        from peft import LoftQConfig
        from peft.tuners.lora import layer as peft_layer

        settings["loftq_config"] = LoftQConfig(loftq_bits=4)
        monkeypatch.setattr(peft_layer, "loftq_init", loftq_result)  # the real one needs bitsandbytes
    with pytest.raises(FrozenWeightError, match="need a dense base"):
        with_lora(model, trained=False, init_lora_weights=init, **settings)


def loftq_result(weight: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(residual weight, lora_A, lora_B), as PEFT's loftq_init returns them."""
    return weight * 1, torch.zeros(4, weight.shape[1]), torch.zeros(weight.shape[0], 4)


def corda_eigens(n: int, k: int, r: int) -> SimpleNamespace:
    """The fields of PEFT's CordaEigens, whose module needs a package that PEFT does not install."""
    return SimpleNamespace(S_WC=torch.ones(r), U_WC=torch.randn(n, r), V_WC=torch.randn(k, r))


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "eva", "mica"])
def test_other_initializations_keep_the_function(init: Any) -> None:
    model = with_lora(nvfp4_mlp(), trained=False, init_lora_weights=init)
    torch.testing.assert_close(model(X), nvfp4_mlp()(X), atol=1e-6, rtol=1e-5)


def test_dora_reads_the_weight() -> None:
    """Unmerged DoRA needs the weight's row norms, which are there to read."""
    model, dense = with_lora(nvfp4_mlp(), use_dora=True), with_lora(dense_copy(nvfp4_mlp()), use_dora=True)
    torch.testing.assert_close(model(X), dense(X))
