"""`halfbyte train` with `fsdp: true`: the run of one process, saved whole, resumed bit for bit, or on other ranks.

A step takes the same examples on any number of ranks (tests/parallel/test_train_ddp.py says why), and AdamW works
element by element on shards; what differs is the order of fp32 sums.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfbyte.checkpoint import resume
from halfbyte.checkpoint.load import load_model
from halfbyte.checkpoint.merge import merge_checkpoint
from halfbyte.nvfp4.convert import nvfp4_modules
from halfbyte.nvfp4.digest import model_digest, weight_digest
from halfbyte.train.config import build_config
from halfbyte.train.trainer import train
from tests.dist import outcomes, run
from tests.parallel.test_train_tensor_parallel import adapter_of, assert_same_run, metrics
from tests.parallel.training import error
from tests.train import tiny

EXAMPLES_PER_STEP = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, Any]:
    """Six steps of four examples, of which the second epoch starts in the middle, clipped, evaluated twice."""
    folder = tmp_path_factory.mktemp("fsdp")
    return {
        "base_model": str(tiny.save_base(folder / "base", tie_word_embeddings=False)),
        "datasets": [str(tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16)))],
        "test_datasets": [str(tiny.write_lines(folder / "held_out.jsonl", tiny.chat_rows(7)))],
        "sequence_len": 128,
        "micro_batch_size": 1,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "lora_r": 4,
        "lora_modules_to_save": ["lm_head"],
        "save_steps": 3,
        "device": "cpu",
    }


def train_rank(settings: dict[str, Any], output_dir: str, changes: dict[str, Any] | None = None) -> str:
    """One run on this rank, sharded where there are several; returns the error, if it was refused."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    values = {**settings, "output_dir": output_dir, "fsdp": ranks > 1}
    try:
        train(build_config(values | {"gradient_accumulation_steps": EXAMPLES_PER_STEP // ranks} | (changes or {})))
    except (ValueError, RuntimeError, OSError) as refused:
        return str(refused)
    return ""


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs") / "alone"
    assert train_rank(settings, str(folder)) == ""
    torch.set_num_threads(threads)
    return folder


@pytest.fixture(scope="module")
def on_two(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    assert run(2, train_rank, settings, str(folder)) == ["", ""]
    return folder


def test_two_ranks_equal_one(alone, on_two) -> None:
    assert_same_run(on_two, alone)


def test_resumed_on_two_ranks_to_the_same_bits(on_two, settings, tmp_path) -> None:
    changes = {"resume_from_checkpoint": str(on_two / "checkpoint-3")}
    assert run(2, train_rank, settings, str(tmp_path / "out"), changes) == ["", ""]
    assert error(adapter_of(tmp_path / "out" / "adapter"), adapter_of(on_two / "adapter")) == 0
    assert metrics(tmp_path / "out", "loss") == metrics(on_two, "loss")[3:]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_resumed_on_other_ranks_and_without_fsdp(ranks: int, alone, on_two, settings, tmp_path) -> None:
    changes = {"resume_from_checkpoint": str(on_two / "checkpoint-3"), "fsdp": ranks == 4}
    out = tmp_path / "out"
    assert set(run(ranks, train_rank, settings, str(out), changes)) == {""}
    assert metrics(out, "loss") == pytest.approx(metrics(alone, "loss")[3:], rel=1e-5)
    assert error(adapter_of(out / "adapter"), adapter_of(alone / "adapter")) < 1e-5


OPTIONS = {
    "no reshard, HSDP": (4, {"dp_replicate_size": 2, "fsdp_config": {"reshard_after_forward": False}}),
    "HSDP, offload, checkpointing": (
        4,
        {"dp_replicate_size": 2, "fsdp_config": {"offload_params": True}, "gradient_checkpointing": True},
    ),
    "offload, checkpointing": (2, {"fsdp_config": {"offload_params": True}, "gradient_checkpointing": True}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "HSDP, offload, checkpointing" else pytest.mark.slow) for n in OPTIONS]
)
def test_options(name: str, alone, settings, tmp_path) -> None:
    ranks, changes = OPTIONS[name]
    assert set(run(ranks, train_rank, settings, str(tmp_path / "out"), changes)) == {""}
    assert_same_run(tmp_path / "out", alone)
    again = changes | {"resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3")}
    assert set(run(ranks, train_rank, settings, str(tmp_path / "again"), again)) == {""}
    assert error(adapter_of(tmp_path / "again" / "adapter"), adapter_of(tmp_path / "out" / "adapter")) == 0


def test_bf16_is_autocast_as_in_one_process(settings, tmp_path) -> None:
    """Frozen parts in bf16, factors in fp32, gathered side by side."""
    changes = {"bf16": True, "max_steps": 2, "optimizer": "adamw4bit"}
    assert train_rank(settings, str(tmp_path / "alone"), changes) == ""
    for ranks, hsdp in ((2, {}), (4, {"dp_replicate_size": 2})):
        out = tmp_path / str(ranks)
        assert set(run(ranks, train_rank, settings, str(out), changes | hsdp)) == {""}
        assert metrics(out, "loss") == pytest.approx(metrics(tmp_path / "alone", "loss"), rel=1e-2)
        assert next(iter(adapter_of(out / "adapter").values())).dtype == torch.float32


def train_and_resume(settings: dict[str, Any], folder: str) -> list[str]:
    changes = {"merge_aware": True, "optimizer": "adamw8bit", "gradient_checkpointing": True, "lora_dropout": 0.1}
    resumed = {"resume_from_checkpoint": f"{folder}/whole/checkpoint-3"}
    return [
        train_rank(settings, f"{folder}/whole", changes),
        train_rank(settings, f"{folder}/resumed", changes | resumed),
    ]


def test_merge_aware_is_merged_to_the_weights_that_were_trained(settings, tmp_path) -> None:
    """Resumed to the same bits too: low-bit states on shards, and each rank's random state, for dropout."""
    assert run(2, train_and_resume, settings, str(tmp_path)) == [["", ""]] * 2
    whole, resumed = (tmp_path / name / "adapter" for name in ("whole", "resumed"))
    assert error(adapter_of(resumed), adapter_of(whole)) == 0
    merge_checkpoint(settings["base_model"], whole, tmp_path / "merged", min_retained=0.5)
    recorded = json.loads((whole / "adapter_config.json").read_text())["halfbyte"]
    layers = nvfp4_modules(load_model(tmp_path / "merged"))
    written = {name: (layer.parts().shape, weight_digest(layer.parts())) for name, layer in layers.items()}
    assert recorded["mode"] == "merge-aware" and recorded["merged_digest"] == model_digest(written)


def train_with_a_fault_in_the_second_save(settings: dict[str, Any], output_dir: str, killed: bool) -> str:
    """On rank one, while the states for step 6 are collected: it is killed, or its disk is full."""
    steps = 0

    def fault(optimizer: torch.optim.Optimizer) -> None:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6 and dist.get_rank() == 1:
            optimizer.register_state_dict_pre_hook(fault)

    hook = register_optimizer_step_post_hook(count)
    try:
        return train_rank(settings, output_dir, {"save_total_limit": 1})
    finally:
        hook.remove()


def test_a_full_disk_on_one_rank_is_the_error_of_all(settings, tmp_path) -> None:
    found = run(2, train_with_a_fault_in_the_second_save, settings, str(tmp_path / "out"), False)
    for text in found:
        assert "checkpoint-6: could not be saved: the disk is full" in text and "checkpoint-3 is complete" in text
    assert [path.name for path in resume.complete_checkpoints(tmp_path / "out")] == ["checkpoint-3"]


def test_killed_while_saving_and_resumed_is_the_same_run(on_two, settings, tmp_path) -> None:
    out = tmp_path / "out"
    results = outcomes(2, train_with_a_fault_in_the_second_save, settings, str(out), True, grace=1)
    assert results[1].exitcode == -signal.SIGKILL
    assert [path.name for path in resume.complete_checkpoints(out)] == ["checkpoint-3"]
    assert run(2, train_rank, settings, str(out), {"resume_from_checkpoint": True}) == ["", ""]
    assert error(adapter_of(out / "checkpoint-6"), adapter_of(on_two / "checkpoint-6")) == 0
    assert metrics(out, "loss") == metrics(on_two, "loss")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp": "full_shard auto_wrap"}, "how FSDP 1 was written; write fsdp: true"),
        ({"fsdp": ["shard_grad_op", "offload"]}, "reshard_after_forward: false, offload_params: true"),
        ({"fsdp": "hybrid_shard"}, "dp_replicate_size"),
        ({"fsdp": True, "fsdp_version": 1}, "fsdp_version is 1, which cannot shard a packed base"),
        ({"fsdp": True, "fsdp_config": {"fsdp_use_orig_params": True}}, "remove fsdp_use_orig_params: it is a setting"),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT"}}, "the adapter is written whole"),
        ({"fsdp": True, "fsdp_config": {"offload_parms": True}}, "did you mean 'offload_params'"),
        ({"fsdp": True, "deepspeed": "zero.json"}, "deepspeed and fsdp are set; a run uses one of them"),
        ({"fsdp": True, "tensor_parallel_size": 2}, "fsdp and tensor_parallel_size are set"),
        ({"fsdp": True, "sample_prompts": ["Hi"]}, "sample_prompts and fsdp are both set"),
        ({"fsdp": False, "dp_replicate_size": 2}, "set fsdp: true, or remove it"),
        ({"fsdp": True}, "this is one process; start several with torchrun"),
    ],
)
def test_refused_before_loading(changes: dict[str, Any], words: str, settings, tmp_path) -> None:
    assert words in train_rank(settings, str(tmp_path / "out"), changes)


def refused_launches(settings: dict[str, Any], output_dir: str, checkpoint: str) -> list[str]:
    return [
        train_rank(settings, output_dir, {"dp_replicate_size": 3}),
        train_rank(settings, output_dir, {"resume_from_checkpoint": checkpoint}),
    ]


def test_launches_that_do_not_fit_are_refused(alone, settings, tmp_path) -> None:
    zero, one = run(2, refused_launches, settings, str(tmp_path / "out"), str(alone / "checkpoint-3"))
    assert zero == one and "the launch has 2 processes, expected a multiple of 3" in zero[0]
    assert "were written by one process or DDP, which this run does not read; remove fsdp" in zero[1]
