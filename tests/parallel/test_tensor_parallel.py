"""Tensor-parallel LoRA on a packed base, compared with one process on the same batch.

They must agree: every product is the same, cut along rows or summed over columns; only sums over columns change their
order, hence 1e-5 in fp32 for losses, gradients and five AdamW steps. AdamW's eps is 1e-5 here: with 1e-8 it divides a
gradient that is nothing but rounding by itself, and a step of +-lr comes out of either sign of that rounding.
"""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.lora import fuse
from halfbyte.lora.adapter_files import load_adapter
from halfbyte.nvfp4.activation import ActivationQuant
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import shard_digest
from halfbyte.parallel import ddp
from halfbyte.parallel.gather import gather_trainable, save_adapter
from halfbyte.parallel.tensor_parallel import clip_grad_norm, tensor_parallel
from halfbyte.parallel.tp_layers import ColumnLinear, CutDropout, RowLinear, cut_factors, gathered
from halfbyte.parallel.tp_lora import CutFusedLoraLinear
from tests.dist import run
from tests.parallel.models import PROJECTIONS, batch, loss_of, tiny_base, tiny_lora, trainable
from tests.parallel.test_agree import text_of_error
from tests.parallel.training import STEPS, error

# Wide enough for four ranks: 4 kv heads, and 64 columns of o_proj in blocks of 16.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}


def mesh_of_all() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def train(model: nn.Module, mesh: Any, parts: list[int], max_norm: float | None = None) -> tuple[list[float], list]:
    """Losses, and gradient norms where they are clipped; mesh None is one process."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
    losses, norms = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        values = [loss_of(model, batch(step, part)) for part in parts]
        for loss in values:
            (loss / len(parts)).backward()
        losses.append(sum(loss.item() for loss in values) / len(parts))
        if max_norm is not None and mesh is not None:
            norms.append(clip_grad_norm(model, max_norm, mesh).item())
        elif max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def gradient_error(model: nn.Module, reference: nn.Module) -> float:
    """Of the first batch's gradients, those of cut factors gathered: the worst tensor's distance, relative to its norm
    or, if that is larger, to a thousandth of the norm of all.

    Softmax's backward subtracts a mean from terms of the size of v's gradients, and what is left for q and k is small
    (1.4e-4 of the norm of all, in one case) but carries those terms' rounding.
    """
    found, expected = gradients(model), gradients(reference)
    assert found.keys() == expected.keys()
    floor = 1e-3 * torch.stack([grad.norm() for grad in expected.values()]).norm()
    return max(((found[n] - grad).norm() / grad.norm().maximum(floor)).item() for n, grad in expected.items())


def biased(model: nn.Module) -> nn.Module:
    """The same with biases that are not zero: a row-wise one that every rank adds would show."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not parameter.is_meta:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def compare(options: dict[str, Any], max_norm: float | None) -> tuple[float, float, float, float]:
    """Errors of losses, norms, gradients and factors against one process; rank one starts on the meta device."""
    mesh, rank = mesh_of_all(), dist.get_rank()
    made, fused = {key: value for key, value in options.items() if key != "fused"}, options.get("fused", False)
    model = biased(tiny_lora(**made, adapter_seed=0, device="meta" if rank else "cpu")).train()
    tensor_parallel(fuse(model) if fused else model, mesh)
    assert fused == any(isinstance(module, CutFusedLoraLinear) for module in model.modules())
    reference = biased(tiny_lora(**made)).train()
    gradients = gradient_error(model, reference)
    losses, norms = train(model, mesh, [0], max_norm)
    expected_losses, expected_norms = train(reference, None, [0], max_norm)
    return (
        (torch.tensor(losses) / torch.tensor(expected_losses) - 1).abs().max().item(),
        (torch.tensor(norms) / torch.tensor(expected_norms) - 1).abs().max().item() if norms else 0.0,
        gradients,
        error(gather_trainable(model), trainable(reference)),
    )


CASES: dict[str, tuple[int, dict[str, Any], float | None]] = {
    "all seven, 2 ranks": (2, {}, None),
    "q and o, 2 ranks, clipped": (2, {"targets": ["q_proj", "o_proj"]}, 0.05),
    "all seven, 4 ranks, clipped": (4, WIDE, 0.05),
    "dense base": (2, {"packed": False}, None),
    "fused, 2 ranks, clipped": (2, {"fused": True}, 0.05),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    ranks, options, max_norm = CASES[name]
    for errors in run(ranks, compare, options, max_norm):
        assert max(errors) < 1e-5, errors


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of the first batch, those of cut factors gathered, in fp32."""
    loss_of(model, batch(0, 0)).backward()
    found, cut = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, cut_factors(model)
    found |= {name: gathered(found[name], *where) for name, where in cut.items()}
    model.zero_grad()
    return {name: grad.float() for name, grad in found.items()}


def in_bf16(packed: bool) -> list[tuple[float, float]]:
    """Errors from the same run in fp32 of one process, and of its parts: logits, gradients, five steps."""
    mesh = mesh_of_all()
    exact, alone, cut = (biased(tiny_lora(packed=packed, dtype=d)) for d in (torch.float32, *[torch.bfloat16] * 2))
    models = (exact, alone, tensor_parallel(cut, mesh))
    logits = [{"": model(input_ids=batch(0, 0)).logits.detach().float()} for model in models]
    grads, start = [gradients(model) for model in models], trainable(exact)
    for model in models:
        train(model, mesh, [0])
    moved = [{n: t.float() - start[n] for n, t in gather_trainable(model).items()} for model in models]
    return [(error(one[1], one[0]), error(one[2], one[0])) for one in (logits, grads, moved)]


@pytest.mark.parametrize("packed", [True, False])
def test_bf16_is_off_by_no_more_than_on_one_process(packed: bool) -> None:
    """Cutting costs the rounding of one more sum a layer: the level of bf16, packed as dense."""
    for errors in run(2, in_bf16, packed):
        for alone, cut in errors:
            assert 1e-4 < cut < 1.5 * alone


def family(name: str) -> tuple[float, int]:
    """Gradient error of another architecture with LoRA on all projections; layers that are cut."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, use_cache=False))
        config = peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False)
        models.append(peft.get_peft_model(base, config))
    tensor_parallel(models[0], mesh_of_all())
    return gradient_error(*models), sum(isinstance(m, (ColumnLinear, RowLinear)) for m in models[0].modules())


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_other_families(name: str) -> None:
    """Biases on q, k, v (qwen2), and norms on the heads of a rank, which are whole and frozen (qwen3)."""
    for gradients_off, cut in run(2, family, name):
        assert gradients_off < 1e-5 and cut == 7


def base_is_cut_not_copied() -> tuple[int, float, bool]:
    """Sum of this rank's shard digests; its share of the bytes; whether a fresh adapter leaves the forward as it is."""
    mesh, whole, model = mesh_of_all(), tiny_base(), tiny_base()
    tensor_parallel(model, mesh)
    rank, total = dist.get_rank(), 0
    for layer in nvfp4_modules(model).values():
        rows, columns = layer.held_shape
        row = rank * rows if rows != layer.out_features else 0
        column = rank * columns if columns != layer.in_features else 0
        total += shard_digest(layer.parts(), row_offset=row, column_offset=column, in_features=layer.in_features)
    held = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    all_bytes = sum(p.numel() for p in whole.parameters() if p.dtype == torch.uint8)
    logits = model(input_ids=batch(0, 0)).logits
    config, same = peft.LoraConfig(r=4, target_modules=PROJECTIONS), True
    for kind in (fuse, lambda model: model):
        adapted = tensor_parallel(kind(peft.get_peft_model(tiny_base(), config)), mesh)
        same &= torch.equal(logits, adapted(input_ids=batch(0, 0)).logits)
    return total, held / all_bytes, same


def test_a_rank_holds_exactly_its_codes() -> None:
    """A fresh adapter (B is zero) leaves the tensor-parallel forward of the bare base as it is, bit for bit."""
    zero, one = run(2, base_is_cut_not_copied)
    whole = sum(shard_digest(layer.parts()) for layer in nvfp4_modules(tiny_base()).values())
    assert (zero[0] + one[0] - whole) % 2**64 == 0
    assert zero[1] == pytest.approx(0.5, abs=0.01)
    assert zero[2] and one[2]


def two_by_two() -> float:
    """SCENARIOS n20: the data-parallel half of each batch on a tensor-parallel pair."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(tiny_lora(adapter_seed=mesh["dp"].get_local_rank()), mesh["tp"])
    wrapped = ddp(model, process_group=mesh["dp"].get_group())
    train(wrapped, mesh["tp"], [mesh["dp"].get_local_rank()])
    reference = tiny_lora()
    train(reference, None, [0, 1])
    return error(gather_trainable(model), trainable(reference))


def test_two_by_two_equals_one_process_on_the_global_batch() -> None:
    assert max(run(4, two_by_two)) < 1e-5


def dropout_masks(checkpointing: bool) -> tuple[list[float], list[float]]:
    mesh = mesh_of_all()
    model, reference = (tiny_lora(dropout=0.5).train() for _ in range(2))
    tensor_parallel(fuse(model) if checkpointing else model, mesh)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return train(model, mesh, [0])[0], train(reference, None, [0])[0]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_draws_the_masks_of_one_process(checkpointing: bool) -> None:
    """On whole inputs and on parts, and again when checkpointing computes them a second time."""
    for losses, expected in run(2, dropout_masks, checkpointing):
        assert losses == pytest.approx(expected, rel=1e-5)


def parts_of_a_mask() -> tuple[Tensor, Tensor, Tensor]:
    """What is left of ones; the whole mask; the next random number."""
    dropout = CutDropout(0.5)
    dropout.group = mesh_of_all().get_group()
    torch.manual_seed(3)
    mine, after = dropout(torch.ones(5, 32)), torch.rand(())
    torch.manual_seed(3)
    return mine, nn.functional.dropout(torch.ones(5, 64), 0.5), after


def test_a_part_of_an_input_has_its_own_part_of_the_mask() -> None:
    (left, whole, one), (right, _, other) = run(2, parts_of_a_mask)
    assert not torch.equal(left, right) and torch.equal(torch.cat([left, right], 1), whole)
    assert one == other


def dynamic(model: nn.Module) -> nn.Module:
    for layer in nvfp4_modules(model).values():
        layer.activation = ActivationQuant()
    return model


def dynamic_logits() -> tuple[float, float]:
    """Largest difference of logits, and gradient error, with inputs quantized by the scale of the whole input."""
    model, reference = dynamic(tiny_lora()), dynamic(tiny_lora())
    tensor_parallel(model, mesh_of_all())
    difference = (model(input_ids=batch(0, 0)).logits - reference(input_ids=batch(0, 0)).logits).abs().max().item()
    return difference, gradient_error(model, reference)


def test_dynamic_activations_take_the_scale_of_the_whole_input() -> None:
    """A rank's own scale would differ from the whole input's by a factor, and move codes by whole steps (1e-2)."""
    for difference, gradients in run(2, dynamic_logits):
        assert difference < 1e-5 and gradients < 1e-5


def save_from_two(folder: str) -> Tensor:
    model = tensor_parallel(tiny_lora(**WIDE), mesh_of_all())
    train(model, mesh_of_all(), [0])
    save_adapter(model, folder)
    return model.eval()(input_ids=batch(0, 0)).logits.detach()


def load_cut(folder: str) -> Tensor:
    model = peft.PeftModel.from_pretrained(tiny_base(**WIDE), folder)
    return tensor_parallel(model, mesh_of_all())(input_ids=batch(0, 0)).logits.detach()


def test_saved_on_two_loaded_on_one_and_four(tmp_path: Path) -> None:
    """SCENARIOS n13; the metadata describes the whole base."""
    logits = run(2, save_from_two, str(tmp_path))[0]
    loaded = load_adapter(tiny_base(**WIDE), tmp_path)
    assert torch.allclose(loaded(input_ids=batch(0, 0)).logits, logits, atol=1e-5)
    assert torch.allclose(run(4, load_cut, str(tmp_path))[3], logits, atol=1e-5)


def diverged_replicas() -> tuple[str, str]:
    mesh = mesh_of_all()
    model = tensor_parallel(tiny_lora(), mesh)
    if dist.get_rank() == 1:
        with torch.no_grad():
            factor: Tensor = next(p for n, p in model.named_parameters() if "q_proj.lora_A" in n)
            factor[0, 0] += 1
    return text_of_error(gather_trainable, model)


def test_replicas_that_differ_are_found_when_gathered() -> None:
    zero, one = run(2, diverged_replicas)
    assert zero == one and "q_proj.lora_A.default.weight is held whole by all ranks, but they differ" in zero[1]
