"""FSDP2's mixed-precision policies: what they cast, compared bit for bit with one process that casts the same.

The one process runs each forward with cast copies of its fp32 parameters (`torch.func.functional_call`), so gradients
come back through the cast, in fp32. On two ranks the mean of two gradients is rounded once, as the sum of halves is.
Merge-aware factors are not cast: W' must be rounded from the factors that are saved.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from halfbyte.parallel.fsdp2 import fsdp2
from halfbyte.parallel.gather import gather_trainable, save_adapter
from tests.dist import run
from tests.parallel.models import batch, loss_of
from tests.parallel.test_fsdp2 import gathered
from tests.parallel.training import STEPS, Case, adamw, error, forward_backward, make, one_process

BF16 = torch.bfloat16
POLICIES = {
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
    "bf16, output in fp32": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=torch.float32
    ),
}


def cast(name: str, parameter: Tensor, mode: str) -> Tensor:
    kept = not parameter.is_floating_point() or ("merge-aware" in mode and ".lora_" in name)
    return parameter if kept else parameter.to(BF16)


def one_process_that_casts(case: Case) -> dict[str, Tensor]:
    model = make(case)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        for part in range(2):
            tokens = batch(step, part)
            copies = {name: cast(name, p, case.mode) for name, p in model.named_parameters()}
            functional_call(model, copies, kwargs={"input_ids": tokens, "labels": tokens}).loss.mul(0.5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def this_rank(case: Case, policy: str) -> tuple[float, float, bool]:
    """Distance of the adapter from the one process that casts, and from one in fp32; whether the base is intact."""
    model = make(case, dist.get_rank())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    fsdp2(model, mp_policy=POLICIES[policy])
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        forward_backward(case, model, step, dist.get_rank(), 1.0)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
        optimizer.zero_grad()
    found = gathered(model)
    intact = all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters() if n in before)
    alone = one_process_that_casts(replace(case, checkpointing=None))  # a functional call is over when recomputing
    return error(found, alone), error(found, one_process(case, 2).adapter), intact


@pytest.mark.parametrize(
    ("policy", "mode"),
    [(policy, mode) for policy in POLICIES for mode in ("plain", "merge-aware", "merge-aware dynamic")][:4],
)
def test_a_policy_casts_what_it_says(policy: str, mode: str) -> None:
    for adapter, from_fp32, intact in run(2, this_rank, Case(mode=mode), policy):
        assert adapter < 1e-6
        assert from_fp32 > 1e-4  # bf16 did something
        assert intact


def test_checkpointing_with_factors_in_a_group_of_their_own() -> None:
    """Recomputed in backward: both groups of a block are gathered again."""
    for adapter, _, intact in run(2, this_rank, Case(mode="merge-aware", checkpointing=False), "bf16, reduced in fp32"):
        assert adapter < 1e-6 and intact


def reduced_in_bf16() -> tuple[float, set[torch.dtype]]:
    """fp32 compute, gradients rounded to bf16 on the wire: near fp32's adapter, and masters stay fp32."""
    model: nn.Module = make(Case(), dist.get_rank())
    fsdp2(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    forward_backward(Case(), model, 0, dist.get_rank(), 1.0)
    reference = make(Case())
    for part in range(2):
        forward_backward(Case(), reference, 0, part, 0.5)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    return error(found, expected), {grad.dtype for grad in found.values()}


def test_gradients_reduced_in_bf16() -> None:
    for distance, dtypes in run(2, reduced_in_bf16):
        assert 1e-4 < distance < 1e-2 and dtypes == {torch.float32}


def saved_after_an_evaluation(folder: str) -> dict[str, Tensor]:
    """A forward alone leaves bf16 copies gathered; what is saved are the fp32 shards."""
    model = make(Case(mode="merge-aware"), dist.get_rank())
    fsdp2(model, mp_policy=POLICIES["bf16, reduced in fp32"], reshard_after_forward=False)
    with torch.no_grad():
        loss_of(model, batch(0, dist.get_rank()))
    save_adapter(model, folder)
    return gather_trainable(model)


def test_what_is_saved_is_not_what_a_policy_has_cast(tmp_path: Path) -> None:
    expected = {n: p.detach() for n, p in make(Case()).named_parameters() if p.requires_grad}
    for found in run(2, saved_after_an_evaluation, str(tmp_path / "adapter")):
        assert error(found, expected) == 0
    assert {t.dtype for t in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {torch.float32}
