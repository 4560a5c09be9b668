"""Merge-aware LoRA under tensor parallelism: the bits of one process, cut.

W' of a rank's slice must be the slice of the whole W', whatever the mode: that is what the merge will write. Gradients
agree to the order of fp32 sums, from equal factors; after steps a code may round the other way, so only the loss does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfbyte.lora.adapter_files import describe_adapter as describe_whole
from halfbyte.lora.adapter_files import save_adapter as save_whole
from halfbyte.lora.merge_aware import make_merge_aware, merge_aware_layers, merged_weights
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel.gather import describe_adapter, save_adapter
from halfbyte.parallel.tensor_parallel import part, tensor_parallel
from halfbyte.parallel.tp_layers import Column
from tests.dist import run
from tests.parallel.models import batch, tiny_lora
from tests.parallel.test_tensor_parallel import WIDE, gradient_error, mesh_of_all, train
from tests.parallel.training import error

MODES: dict[str, dict[str, Any]] = {
    "dither, kept scales": {},
    "dither, fresh scales": {"scales": "fresh"},
    "nearest, fresh scales": {"rounding": "nearest", "scales": "fresh"},
}


def make(mode: dict[str, Any], *, dynamic: bool = False, dropout: float = 0.0, **changes: Any) -> nn.Module:
    model = make_merge_aware(tiny_lora(dropout=dropout, **changes), seed=5, **mode)
    for layer in nvfp4_modules(model).values():
        layer.activation = ActivationQuant() if dynamic else None
    return model


def slices(mode: dict[str, Any], dynamic: bool) -> tuple[bool, int, float, float]:
    """Whether all slices are bit-equal; codes that the adapter moved; errors of logits and gradients."""
    whole, mesh = make(mode, dynamic=dynamic, **WIDE), mesh_of_all()
    model = tensor_parallel(make(mode, dynamic=dynamic, **WIDE), mesh)
    expected, layers = dict(merged_weights(whole)), merge_aware_layers(model)
    equal, moved = True, 0
    for name, parts in expected.items():
        found, dim = layers[name].merged_weight(), 0 if isinstance(layers[name].base_layer, Column) else 1
        moved += int((found.qdata != layers[name].frozen().parts().qdata).sum())
        for component in ("qdata", "scale"):
            slice_ = part(getattr(parts, component), dim, mesh).view(torch.uint8)
            equal &= torch.equal(getattr(found, component).view(torch.uint8), slice_)
    logits, reference = (m(input_ids=batch(0, 0)).logits.detach() for m in (model, whole))
    return equal, moved, error({"": logits}, {"": reference}), gradient_error(model, whole)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_merged_slices_are_slices_of_the_merged_weight(ranks: int, mode: str) -> None:
    for equal, moved, logits, gradients in run(ranks, slices, MODES[mode], False):
        assert equal and moved > 50
        assert logits < 1e-5 and gradients < 1e-5


def test_with_dynamic_activations() -> None:
    for equal, _, logits, gradients in run(2, slices, {}, True):
        assert equal and logits < 1e-5 and gradients < 1e-5


def zero_on_one_rank() -> list[bool]:
    """lora_B is zero in the first rank's rows (column-wise), lora_A in its columns (row-wise)."""
    mode, equal = MODES["nearest, fresh scales"], []
    whole = make(mode)
    for layer in merge_aware_layers(whole).values():
        rows = 1 if "o_proj" in layer.recipe.name or "down_proj" in layer.recipe.name else 0
        factor = (layer.lora_B, layer.lora_A)[rows]["default"].weight.data
        factor.narrow(rows, 0, factor.shape[rows] // 2).zero_()
    mesh, expected = mesh_of_all(), dict(merged_weights(whole))
    model = tensor_parallel(whole, mesh)
    for name, layer in merge_aware_layers(model).items():
        dim = 0 if isinstance(layer.base_layer, Column) else 1
        equal.append(torch.equal(layer.merged_weight().qdata, part(expected[name].qdata, dim, mesh)))
    return equal


def test_a_slice_without_change_is_rounded_as_the_rest() -> None:
    """On fresh scales a weight whose adapter is zero stays as it is; a zero slice of one that is not must not."""
    assert all(map(all, run(2, zero_on_one_rank)))


def before_the_start_step() -> tuple[float, float]:
    """Errors of logits and gradients while the layers are not active: plain LoRA."""
    model, whole = make({"active": False}), tiny_lora()
    tensor_parallel(model, mesh_of_all())
    logits = [one(input_ids=batch(0, 0)).logits.detach() for one in (model, whole)]
    return error({"": logits[0]}, {"": logits[1]}), gradient_error(model, whole)


def test_before_the_start_step_it_is_plain_lora() -> None:
    assert max(map(max, run(2, before_the_start_step))) < 1e-5


def losses(dropout: float) -> tuple[list[float], list[float]]:
    whole, model = make({}, dropout=dropout).train(), make({}, dropout=dropout).train()
    tensor_parallel(model, mesh_of_all())
    return train(model, mesh_of_all(), [0], 0.05)[0], train(whole, None, [0], 0.05)[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_five_steps(dropout: float) -> None:
    for found, expected in run(2, losses, dropout):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found == pytest.approx(expected, rel=3e-3)


def saved(folder: str) -> bool:
    model = tensor_parallel(make({}), mesh_of_all())
    described = describe_adapter(model, start_step=3)
    save_adapter(model, folder, start_step=3)
    return dist.get_rank() > 0 or described == describe_whole(make({}), start_step=3)


def test_metadata_and_files_are_those_of_one_process(tmp_path: Path) -> None:
    assert all(run(2, saved, str(tmp_path / "two")))
    save_whole(make({}), tmp_path / "one", start_step=3)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "two")]
    for config in configs:
        config["target_modules"].sort()  # PEFT keeps a set
    assert configs[0] == configs[1] and len(configs[0]["halfbyte"]["merged_digest"]) == 64
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]
