"""Which run reads whose optimizer states: every pair, from the names of the files alone."""

from pathlib import Path
from typing import Any

import pytest

from halfbyte.train.config import build_config
from halfbyte.train.states import check_states

FILES = {
    "one process or DDP": ["optimizer.pt"],
    "FSDP2": ["optimizer/.metadata"],
    "DeepSpeed": [f"global_step2/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)],
    "tensor parallelism": ["optimizer-0-of-2.pt", "optimizer-1-of-2.pt"],
}
RUNS: dict[str, dict[str, Any]] = {
    "one process or DDP": {},
    "FSDP2": {"fsdp": True},
    "DeepSpeed": {"deepspeed": "zero.json"},
    "tensor parallelism": {"tensor_parallel_size": 2},
}
READ = {(name, name) for name in RUNS} | {("FSDP2", "one process or DDP")}


def checkpoint(folder: Path, files: list[str]) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def check(folder: Path, run: str, ranks: int = 2) -> None:
    config = build_config({"base_model": "base", "datasets": ["rows.jsonl"], "output_dir": "out"} | RUNS[run])
    check_states(folder, config, ranks)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("writer", FILES)
def test_every_pair(writer: str, run: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, FILES[writer])
    if (writer, run) in READ:
        check(folder, run)
    else:
        with pytest.raises(ValueError, match=f"were written by {writer}, which this run does not read; "):
            check(folder, run)


def test_deepspeed_on_another_number_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DeepSpeed wrote it on 2 ranks, .* but 4 were started; start 2"):
        check(checkpoint(tmp_path, FILES["DeepSpeed"]), "DeepSpeed", ranks=4)


def test_no_states_are_no_fresh_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no optimizer states"):
        check(checkpoint(tmp_path, ["adapter_model.safetensors"]), "one process or DDP")
