"""What tensor parallelism refuses: layer, found, expected and remedy, before any weight is loaded.

Nearly all of it is asked of models on the meta device, which have no weights; nothing could be loaded before.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from halfbyte.lora.merge_aware import make_merge_aware
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel.mesh import tensor_mesh
from halfbyte.parallel.tensor_parallel import tensor_parallel
from halfbyte.parallel.tp_plan import check, plan_of
from tests.dist import run
from tests.parallel.models import batch, tiny_base, tiny_lora
from tests.parallel.test_agree import text_of_error
from tests.parallel.test_tensor_parallel import mesh_of_all

Q = "model.layers.0.self_attn.q_proj"


def base(**changes: Any) -> nn.Module:
    return tiny_base(**changes).to("meta")


def with_down_proj(layer: nn.Module) -> nn.Module:
    model = base()
    model.model.layers[1].mlp.down_proj = layer
    return model


def with_plan(plan: dict[str, str] | None, **changes: Any) -> nn.Module:
    model = base(**changes)
    model.config.base_model_tp_plan = plan
    return model


def adapted(packed: bool = True, **options: Any) -> nn.Module:
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})
    return peft.get_peft_model(base(packed=packed), config, low_cpu_mem_usage=True)


def other_tuner() -> nn.Module:
    config = peft.OFTConfig(r=2, oft_block_size=0, target_modules=["q_proj"])
    return peft.get_peft_model(tiny_base(packed=False), config)


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "degree does not divide the heads": (
        lambda: base(num_attention_heads=1, num_key_value_heads=1),
        ["num_attention_heads is 1", "multiple of the 2 ranks", "divides it: 1"],
    ),
    "degree does not divide the kv heads": (
        lambda: base(num_attention_heads=3, num_key_value_heads=3, hidden_size=48),
        ["num_attention_heads is 3", "multiple of the 2 ranks", "divides it: 1, 3"],
    ),
    "degree does not divide the features": (
        lambda: with_down_proj(nn.Linear(63, 32, device="meta").requires_grad_(False)),
        ["model.layers.1.mlp.down_proj", "in_features is 63", "multiple of the 2 ranks", "use a degree"],
    ),
    "a K shard that is no multiple of 16": (
        lambda: with_down_proj(NVFP4Linear(48, 32, device="meta")),
        ["model.layers.1.mlp.down_proj", "in_features 48 over 2 ranks gives 24", "multiple of 16", "must divide 3"],
    ),
    "a style that we do not know": (
        lambda: with_plan({"layers.*.mlp.up_proj": "sequence_parallel"}),
        ["model.layers.0.mlp.up_proj", "says sequence_parallel", "expected colwise", "plan=..."],
    ),
    "a style for something else": (
        lambda: with_plan({"layers.*.mlp": "moe_tp_experts"}),
        ["model.layers.0.mlp", "says moe_tp_experts for LlamaMLP", "expected colwise", "plan=..."],
    ),
    "an entry for a parameter": (
        lambda: with_plan({"layers.*.mlp.up_proj.qdata": "packed_colwise"}),
        ["up_proj.qdata", "says packed_colwise for a parameter", "expected colwise", "plan=..."],
    ),
    "no plan": (lambda: with_plan(None), ["no tensor-parallel plan", "expected one", "DDP, FSDP2"]),
    "DoRA": (lambda: adapted(False, use_dora=True), [Q, "DoRA", "expected plain LoRA", "use plain LoRA"]),
    "another tuner": (other_tuner, [Q, "peft.tuners.oft", "expected plain LoRA", "use plain LoRA"]),
    "a bias in the adapter": (lambda: adapted(lora_bias=True), [Q, "bias in the adapter", "expected lora_bias=False"]),
    "a trained bias of the base": (lambda: adapted(bias="all"), [Q, "bias that is trained", "bias='none'"]),
    "a layer trained in full": (
        lambda: adapted(False, modules_to_save=["k_proj"]),
        ["k_proj", "modules_to_save", "expected a frozen layer", "target_modules"],
    ),
    "an adapter on a gathered layer": (
        lambda: with_plan_on_adapter({"lm_head": "colwise_gather_output"}),
        ["lm_head", "outputs are joined", "expected none there"],
    ),
}


def with_plan_on_adapter(plan: dict[str, str]) -> nn.Module:
    model = adapted(target_modules=["lm_head"])
    model.config.base_model_tp_plan = plan
    return model


@pytest.mark.parametrize("case", CASES)
def test_refused_on_a_model_without_weights(case: str) -> None:
    make, words = CASES[case]
    model = make()
    with pytest.raises(ValueError) as refused:
        check(model, plan_of(model), 2)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def on_both_ranks() -> list[tuple[str, str]]:
    dora = adapted(False, use_dora=True)
    return [text_of_error(tensor_parallel, dora, mesh_of_all()), text_of_error(tensor_mesh, "cpu", 3)]


def test_all_ranks_raise_alike_and_a_mesh_needs_a_multiple_of_the_degree() -> None:
    zero, one = run(2, on_both_ranks)
    assert zero == one
    assert zero[0][0] == "ValueError" and "DoRA" in zero[0][1]
    for word in ("degree is 3", "launch has 2 processes", "expected a multiple of 3", "torchrun --nproc-per-node 3"):
        assert word in zero[1][1]


def adapter_names() -> tuple[str, str]:
    model = tensor_parallel(tiny_lora(), mesh_of_all()).eval()
    return text_of_error(model, input_ids=batch(0, 0), adapter_names=["default", "__base__"])


def test_mixed_batches_are_refused() -> None:
    """PEFT takes adapter_names with a batch, so this can only be said at the forward."""
    for kind, text in run(2, adapter_names):
        assert kind == "ValueError"
        assert "found ['__base__', 'default']" in text and "expect one" in text and "on their own" in text


def merge_aware_after() -> tuple[str, str]:
    return text_of_error(make_merge_aware, tensor_parallel(tiny_lora(), mesh_of_all()))


def test_merge_aware_comes_before_cutting() -> None:
    for kind, text in run(2, merge_aware_after):
        assert kind == "ValueError" and "cut over a mesh already; make it merge-aware before" in text


def test_nothing_of_a_meta_model_was_given_memory() -> None:
    model = base()
    check(model, plan_of(model), 2)
    assert all(parameter.device == torch.device("meta") for parameter in model.parameters())
