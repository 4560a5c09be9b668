"""The base model's name of a layer, whatever is wrapped around it."""

import pytest
import torch
from torch import nn

from halfbyte.lora.names import base_layers, base_name
from tests.lora.models import nvfp4_mlp, with_lora

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "fqn",
    [
        NAME,
        f"base_model.model.{NAME}",
        f"base_model.model.{NAME}.base_layer",
        f"module.base_model.model.{NAME}.base_layer",
        f"module._orig_mod.base_model.model.{NAME}.base_layer",
        "_orig_mod.base_model.model.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.base_layer",
        "base_model.model.model.layers.0._orig_mod.mlp._fsdp_wrapped_module.up_proj",
    ],
)
def test_wrappers_are_stripped(fqn: str) -> None:
    assert base_name(fqn) == NAME


def test_layers_of_a_wrapped_model() -> None:
    model = nn.DataParallel(torch.compile(with_lora(nvfp4_mlp())))
    assert list(base_layers(model)) == ["up", "down"] == list(base_layers(nvfp4_mlp()))
