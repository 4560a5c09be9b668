"""Every rank ends with rank zero's model, or every rank stops with the same sentence."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.linear import NVFP4Linear
from halfbyte.parallel import ddp, synchronize
from halfbyte.parallel.digests import content_digests
from halfbyte.parallel.synchronize import compare_contents
from tests.dist import outcomes, run
from tests.parallel.models import batch, loss_of, tiny_lora
from tests.parallel.test_agree import text_of_error

LAYER = "base_model.model.model.layers.1.mlp.up_proj.base_layer"


def digests_after(meta: bool) -> tuple[dict[str, str], list[str]]:
    rank = dist.get_rank()
    model = tiny_lora(seed=rank, adapter_seed=rank, device="meta" if meta and rank else "cpu")
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    ddp(model)
    assert trainable == [name for name, p in model.named_parameters() if p.requires_grad]
    return content_digests(model), trainable


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_hold_rank_zero_bytes(world_size: int, meta: bool) -> None:
    """Base, dense frozen parameters, adapters and buffers; also when only rank zero has any."""
    expected = content_digests(tiny_lora())
    for digests, _ in run(world_size, digests_after, meta):
        assert digests == expected


def one_code_changed() -> bool:
    """Rank 1 starts with another code and a NaN pattern among the block scales (0x7f is E4M3's NaN)."""
    model = tiny_lora()
    layer = nvfp4_modules(model)[LAYER]
    layer.scale[1, 1] = 0x7F
    nan_everywhere = layer.scale.clone()
    if dist.get_rank() == 1:
        layer.qdata[3, 2] ^= 0x10
        layer.scale[1, 1] = 0xFF
    synchronize(model)
    return torch.equal(layer.scale, nan_everywhere) and torch.equal(
        layer.qdata, nvfp4_modules(tiny_lora())[LAYER].qdata
    )


def test_other_bytes_are_overwritten_exactly() -> None:
    assert all(run(2, one_code_changed))


def spoil_layout(model: nn.Module) -> None:
    old = nvfp4_modules(model)[LAYER]
    old.qdata = nn.Parameter(old.qdata.t().contiguous(), requires_grad=False)


def spoil_shape(model: nn.Module) -> None:
    model.get_submodule(LAYER.removesuffix(".base_layer")).base_layer = NVFP4Linear(48, 64)


def spoil_activation(model: nn.Module) -> None:
    nvfp4_modules(model)[LAYER].activation = ActivationQuant(0.5)


def spoil_dtype(model: nn.Module) -> None:
    nvfp4_modules(model)[LAYER].dtype = torch.bfloat16


def spoil_dense_dtype(model: nn.Module) -> None:
    model.get_input_embeddings().to(torch.bfloat16)


def spoil_bias(model: nn.Module) -> None:
    nvfp4_modules(model)[LAYER].bias = nn.Parameter(torch.zeros(64), requires_grad=False)


def spoil_cast(model: nn.Module) -> None:
    layer = nvfp4_modules(model)[LAYER]
    layer.scale = nn.Parameter(layer.scale.float(), requires_grad=False)


def spoil_frozen(model: nn.Module) -> None:
    layer = nvfp4_modules(model)[LAYER]
    layer.qdata = nn.Parameter(layer.qdata.float())


def spoil_training(model: nn.Module) -> None:
    model.get_input_embeddings().requires_grad_(True)


def spoil_adapter(model: nn.Module) -> None:
    del model.base_model.model.lm_head


class Unreadable:
    """A setting that fails when it is looked at: any exception inside the check."""

    def __repr__(self) -> str:
        raise OSError("cannot read the shard")


def spoil_by_raising(model: nn.Module) -> None:
    nvfp4_modules(model)[LAYER].activation = Unreadable()  # type: ignore[assignment]


SPOILED = {
    spoil_layout: ("ValueError", f"rank 1: ValueError: {LAYER}.qdata is uint8 [16, 64], expected uint8 [64, 16]"),
    spoil_shape: ("ValueError", f"rank 1, {LAYER}: shape is [64, 48], expected [64, 32] as on rank 0"),
    spoil_activation: (
        "ValueError",
        f"rank 1, {LAYER}: activation is ActivationQuant(scale=0.5), expected None as on rank 0",
    ),
    spoil_dtype: ("ValueError", f"rank 1, {LAYER}: dtype is bfloat16, expected float32 as on rank 0"),
    spoil_dense_dtype: ("ValueError", "embed_tokens.weight: dtype is bfloat16, expected float32 as on rank 0"),
    spoil_bias: ("ValueError", f"rank 1, {LAYER}: bias is True, expected False as on rank 0"),
    spoil_cast: ("ValueError", f"rank 1: ValueError: {LAYER}.scale is float32 [64, 2], expected uint8 [64, 2]"),
    spoil_frozen: ("ValueError", f"rank 1: ValueError: {LAYER}.qdata requires a gradient"),
    spoil_training: ("ValueError", "embed_tokens.weight: trainable is True, expected False as on rank 0"),
    spoil_adapter: ("ValueError", "rank 1 lacks base_model.model.lm_head.weight, which rank 0 has"),
    spoil_by_raising: ("RuntimeError", "rank 1: OSError: cannot read the shard"),
}


def errors_when_rank_one_is_spoiled() -> dict[str, tuple[str, str]]:
    found = {}
    for spoil in SPOILED:
        model = tiny_lora()
        if dist.get_rank() == 1:
            spoil(model)
        found[spoil.__name__] = text_of_error(ddp, model)
    return found


def test_differences_are_the_same_error_on_every_rank() -> None:
    """One call for all cases; it also shows that a refusal leaves the process group usable."""
    zero, one = run(2, errors_when_rank_one_is_spoiled)
    assert zero == one
    for spoil, (kind, words) in SPOILED.items():
        assert zero[spoil.__name__][0] == kind, spoil.__name__
        assert words in zero[spoil.__name__][1], zero[spoil.__name__]


def rank_zero_on_meta() -> tuple[str, str]:
    return text_of_error(ddp, tiny_lora(device="meta" if dist.get_rank() == 0 else "cpu"))


def test_rank_zero_must_have_the_weights() -> None:
    zero, one = run(2, rank_zero_on_meta)
    assert zero == one and "rank 0 must load the checkpoint" in zero[1]


def raises_before_ddp() -> tuple[str, str]:
    """The user's own loading fails on rank 1, outside of our block."""
    if dist.get_rank() == 1:
        raise FileNotFoundError("shard 3")
    return text_of_error(ddp, tiny_lora(), timeout=2.0)


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    zero, one = outcomes(2, raises_before_ddp)
    assert isinstance(one.error, FileNotFoundError)
    assert zero.value[0] == "RuntimeError" and "nothing came from rank 1" in zero.value[1]
    assert zero.seconds < 15


def dies_in_the_first_step() -> tuple[str, str]:
    wrapped = ddp(tiny_lora())
    loss = loss_of(wrapped, batch(0, 0))
    if dist.get_rank() == 1:
        os._exit(9)
    start = time.monotonic()
    kind, text = text_of_error(loss.backward)
    assert time.monotonic() - start < 30
    return kind, text


def test_death_in_the_first_step_stops_the_others() -> None:
    zero, one = outcomes(2, dies_in_the_first_step)
    assert one.exitcode == 9
    assert zero.value[0] == "RuntimeError"


def damaged_on_the_way() -> tuple[str, str]:
    model = tiny_lora()
    if dist.get_rank() == 1:
        nvfp4_modules(model)[LAYER].scale[5, 1] ^= 1
    return text_of_error(compare_contents, model)


def test_a_damaged_bit_is_found() -> None:
    zero, one = run(2, damaged_on_the_way)
    assert zero == one and zero[0] == "RuntimeError"
    assert f"still differ in 1 tensors: rank 1, {LAYER}: digest is" in zero[1]


def report_of_sync() -> tuple[int, int]:
    report = synchronize(tiny_lora())
    assert report is not None
    return report.num_tensors, report.size_bytes


def test_report() -> None:
    model = tiny_lora()
    tensors = [*model.parameters(), *model.buffers()]
    for num_tensors, size_bytes in run(2, report_of_sync):
        assert num_tensors == len(tensors)
        assert size_bytes >= sum(t.nbytes for t in tensors)


def test_one_process_has_nothing_to_do() -> None:
    assert synchronize(tiny_lora()) is None
