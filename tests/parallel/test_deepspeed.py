"""LoRA on a packed base under DeepSpeed ZeRO-1, 2 and 3, compared with one process on the same micro-batches.

They must agree as under DDP: the stages differ in who holds which state, not in what is computed; the optimizer works
element by element on flat fp32 partitions.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.parallel.deepspeed import check_config, prepare_for_deepspeed
from halfbyte.parallel.gather import gather_trainable, save_adapter
from tests.dist import run
from tests.parallel import zero
from tests.parallel.training import Case, error, make, one_process

pytest.importorskip("deepspeed")
TIMEOUT = 120  # a worker's first call imports deepspeed


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    subprocess.run([sys.executable, "-m", "tests.parallel.build_deepspeed_op"], check=True, timeout=900)


def compare(case: Case, stage: int, options: dict[str, Any]) -> tuple[float, bool]:
    """Error of the adapter; whether the base's bytes are as they were, a global scale that bf16 would round included."""
    model = make(case, dist.get_rank())
    expected = one_process(case, dist.get_world_size()).adapter
    settings = prepare_for_deepspeed(model, zero.config(stage, **options))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    engine = zero.initialize(model, settings)
    zero.take_steps(engine)
    after = zero.whole_base(engine.module)
    return error(gather_trainable(engine.module), expected), all(torch.equal(after[n], t) for n, t in before.items())


@pytest.mark.parametrize("mode", ["plain", "dynamic", "merge-aware", "merge-aware dynamic"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_equal_one_process(stage: int, mode: str) -> None:
    for adapter, intact in run(2, compare, Case(mode=mode), stage, {}, timeout=TIMEOUT):
        assert adapter < 1e-5
        assert intact
