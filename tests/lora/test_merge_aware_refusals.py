"""What a merged weight cannot honour is refused before training: other variants, several adapters, no such layer."""

from typing import Any

import pytest
import torch
from peft import LoraConfig

from halfbyte.lora import make_merge_aware
from halfbyte.lora.merge_aware import merge_aware_layers
from tests.lora.models import nvfp4_mlp, with_lora

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoraLinearVariant, not plain LoRA"),
    "lora bias": ({"lora_bias": True}, r"has a bias \(lora_bias=True\)"),
    "base bias": ({"bias": "all"}, "trains biases of the base"),
    "lora bias of base": ({"bias": "lora_only"}, "trains biases of the base"),
    "mica": ({"init_lora_weights": "mica"}, "not plain LoRA"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_merged_weight_cannot_honour_is_refused(case: str) -> None:
    settings, message = REFUSED[case]
    model = with_lora(nvfp4_mlp(), trained=False, **settings)
    with pytest.raises(ValueError, match=message):
        make_merge_aware(model)
    assert not merge_aware_layers(model)


def test_several_active_adapters_are_refused_before_and_later() -> None:
    model = with_lora(nvfp4_mlp())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up"]))
    make_merge_aware(model)  # one is active: fine
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="up: .*2 adapters are active"):
        model(X)
    with pytest.raises(ValueError, match="2 adapters are active"):
        make_merge_aware(model)


def test_an_adapter_added_later_is_checked_too() -> None:
    model = make_merge_aware(with_lora(nvfp4_mlp()))
    model.add_adapter("dora", LoraConfig(r=2, target_modules=["up"], use_dora=True))
    model.set_adapter("dora")
    with pytest.raises(ValueError, match="not plain LoRA"):
        model(X)


def test_mixed_batches_are_refused() -> None:
    model = make_merge_aware(with_lora(nvfp4_mlp())).eval()
    with pytest.raises(ValueError, match="adapter_names mixes adapters"):
        model(X, adapter_names=["default"] * 4 + ["__base__"])


def test_models_without_such_layers_are_refused() -> None:
    from peft import IA3Config, get_peft_model

    with pytest.raises(ValueError, match="needs a LoRA layer over an NVFP4 weight"):
        make_merge_aware(nvfp4_mlp())
    with pytest.raises(ValueError, match="needs a LoRA layer over an NVFP4 weight"):
        make_merge_aware(with_lora(nvfp4_mlp(), target_modules=["head"]))
    ia3 = get_peft_model(nvfp4_mlp(), IA3Config(target_modules=["up"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="up: Linear is no plain LoRA layer"):
        make_merge_aware(ia3)
