"""An adapter saved from a sharded run is the one of the unsharded run, metadata and merged digest included."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from halfbyte.lora.adapter_files import save_adapter as save_unsharded
from halfbyte.parallel.deepspeed import prepare_for_deepspeed
from halfbyte.parallel.fsdp2 import fsdp2
from halfbyte.parallel.gather import save_adapter
from halfbyte.parallel.mesh import data_mesh
from halfbyte.parallel.synchronize import synchronize
from tests.dist import run
from tests.parallel import zero
from tests.parallel.test_deepspeed import TIMEOUT, built  # noqa: F401 - the fixture that compiles the op
from tests.parallel.training import Case, make

pytestmark = pytest.mark.timeout(1200)  # the first test may wait for a compiler


def save_from(engine: str, mode: str, folder: str) -> None:
    model = make(Case(mode=mode), dist.get_rank())
    if engine in ("fsdp2", "hsdp"):
        fsdp2(model, data_mesh("cpu", replicate=2 if engine == "hsdp" else 1))
    elif engine.startswith("zero"):
        model = zero.initialize(model, prepare_for_deepspeed(model, zero.config(int(engine[-1])))).module
    else:
        synchronize(model)
    save_adapter(model, folder, start_step=3)


@pytest.mark.parametrize("mode", ["plain", "merge-aware dynamic"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"])
def test_files_are_those_of_one_process(engine: str, mode: str, tmp_path: Path) -> None:
    run(4 if engine == "hsdp" else 2, save_from, engine, mode, str(tmp_path / "sharded"), timeout=TIMEOUT)
    save_unsharded(make(Case(mode=mode)), tmp_path / "alone", start_step=3)
    left, right = (tmp_path / name for name in ("sharded", "alone"))
    ours, theirs = (json.loads((f / "adapter_config.json").read_text())["halfbyte"] for f in (left, right))
    assert ours == theirs
    assert (ours["merged_digest"] is None) == (mode == "plain")
    assert_equal(load_file(left / "adapter_model.safetensors"), load_file(right / "adapter_model.safetensors"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
