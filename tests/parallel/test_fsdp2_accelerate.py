"""FSDP2 as Accelerate prepares it for `Trainer` and TRL, with nothing of ours but the NVFP4 layers.

`Accelerator` turns its FSDP plugin on for GPUs only, so here the function that it calls then is called with what it
reads from an accelerator. benchmarks/fsdp2.py goes through `Accelerator` itself on GPUs.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from halfbyte.parallel.gather import save_adapter
from tests.dist import run
from tests.parallel.models import batch, loss_of
from tests.parallel.test_agree import text_of_error
from tests.parallel.test_fsdp2 import gathered
from tests.parallel.training import STEPS, Case, error, make, one_process


def accelerator_like(ram_efficient: bool, mixed_precision: str) -> SimpleNamespace:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=ram_efficient,
        state_dict_type="SHARDED_STATE_DICT",
    )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0,
        mixed_precision=mixed_precision,
    )


def prepared(mode: str, ram_efficient: bool, mixed_precision: str) -> tuple[float, float, bool]:
    """Error of the adapter on this rank; share of the packed base at rest; whether its bytes are as they were."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    rank, case = dist.get_rank(), Case(mode=mode)
    model = make(case)
    whole = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    if ram_efficient and rank:
        for parameter in model.parameters():  # what Accelerate's loading leaves there: memory without values
            parameter.data.zero_()
    model = fsdp2_prepare_model(accelerator_like(ram_efficient, mixed_precision), model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = sum(p.to_local().numel() for p in model.parameters() if p.dtype == torch.uint8)
    unchanged = all(torch.equal(p.full_tensor(), whole[n]) for n, p in model.named_parameters() if n in whole)
    return (
        error(gathered(model), one_process(case, 2).adapter),
        mine / sum(t.numel() for t in whole.values()),
        unchanged,
    )


@pytest.mark.parametrize("ram_efficient", [False, True])
@pytest.mark.parametrize("mode", ["plain", "merge-aware dynamic"])
def test_prepared_by_accelerate(mode: str, ram_efficient: bool) -> None:
    for adapter, share, unchanged in run(2, prepared, mode, ram_efficient, "no"):
        assert adapter < 1e-5
        assert share == pytest.approx(0.5)
        assert unchanged


def test_mixed_precision_leaves_the_base() -> None:
    """bf16 compute: far from fp32's adapter after AdamW steps, but no byte of the base has moved."""
    for _, _, unchanged in run(2, prepared, "plain", True, "bf16"):
        assert unchanged


def merge_aware_in_bf16(folder: str) -> tuple[str, str]:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    model = fsdp2_prepare_model(accelerator_like(False, "bf16"), make(Case(mode="merge-aware")))
    loss_of(model, batch(0, dist.get_rank())).backward()
    return text_of_error(save_adapter, model, folder)


def test_factors_that_its_policy_casts_are_refused_under_merge_aware(tmp_path: Path) -> None:
    """It trains W' from bf16 factors; the fp32 ones that would be saved merge to another weight."""
    zero, one = run(2, merge_aware_in_bf16, str(tmp_path / "adapter"))
    assert zero == one and zero[0] == "ValueError"
    assert "trained from factors cast to torch.bfloat16" in zero[1] and "halfbyte.parallel.fsdp2" in zero[1]
    assert not (tmp_path / "adapter").exists()
