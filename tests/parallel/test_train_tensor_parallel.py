"""`halfbyte train` with `tensor_parallel_size`: the run of one process, saved whole, resumed bit for bit.

Ranks of a tensor group see one batch, groups different ones, so a run takes the same examples per step on one process,
on two ranks that cut the model, and on 2 x 2. Only the order of fp32 sums differs; AdamW's eps is 1e-5 for the reason
that tests/parallel/test_tensor_parallel.py gives. Dropout is on where the ranks share all batches: they draw the masks
of one process.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from halfbyte.checkpoint import resume
from halfbyte.checkpoint.load import load_model
from halfbyte.lora.adapter_files import load_adapter
from halfbyte.train.config import build_config, load_config
from halfbyte.train.data import load_data
from halfbyte.train.files import METRICS, read_metrics
from halfbyte.train.trainer import train
from tests.dist import run
from tests.parallel.training import error
from tests.train import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-tp2.yaml"
EXAMPLES_PER_STEP = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, Any]:
    """Six steps of four examples, of which the second epoch starts in the middle, clipped, evaluated twice."""
    folder = tmp_path_factory.mktemp("tp")
    base = tiny.save_base(folder / "base", tie_word_embeddings=False)
    return {
        "base_model": str(base),
        "datasets": [str(tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16)))],
        "test_datasets": [str(tiny.write_lines(folder / "held_out.jsonl", tiny.chat_rows(7)))],
        "sequence_len": 128,
        "micro_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 3e-3,
        "adam_epsilon": 1e-5,
        "max_grad_norm": 0.5,
        "lora_r": 4,
        "lora_dropout": 0.1,
        "lora_modules_to_save": ["lm_head"],
        "save_steps": 3,
        "device": "cpu",
    }


def train_rank(settings: dict[str, Any], output_dir: str, degree: int, changes: dict[str, Any] | None = None) -> str:
    """One run on this rank; returns the error, if it was refused."""
    copies = dist.get_world_size() // degree if dist.is_initialized() else 1
    accumulate = EXAMPLES_PER_STEP // settings["micro_batch_size"] // max(copies, 1)
    values = {**settings, "output_dir": output_dir, "gradient_accumulation_steps": accumulate}
    try:
        train(build_config(values | {"tensor_parallel_size": degree} | (changes or {})))
    except (ValueError, RuntimeError) as refused:
        return str(refused)
    return ""


def alone_on_one_thread(settings: dict[str, Any], folder: Path, changes: dict[str, Any] | None = None) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert train_rank(settings, str(folder), 1, changes) == ""
    torch.set_num_threads(threads)
    return folder


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def metrics(output_dir: Path, key: str) -> list[float]:
    return [row[key] for row in read_metrics(output_dir / METRICS) if key in row]


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory) -> Path:
    return alone_on_one_thread(settings, tmp_path_factory.mktemp("runs") / "alone")


@pytest.fixture(scope="module")
def on_two(settings, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "two"
    assert run(2, train_rank, settings, str(folder), 2) == ["", ""]
    return folder


def assert_same_run(found: Path, expected: Path) -> None:
    for key in ("loss", "eval_loss", "grad_norm", "learning_rate", "num_tokens"):
        assert metrics(found, key) == pytest.approx(metrics(expected, key), rel=1e-5), key
    assert error(adapter_of(found / "adapter"), adapter_of(expected / "adapter")) < 1e-5


def test_two_ranks_equal_one(alone, on_two) -> None:
    """Losses, held-out losses, clipped norms, tokens, and the adapter that PEFT's files hold."""
    assert_same_run(on_two, alone)
    configs = [json.loads((folder / "adapter" / "adapter_config.json").read_text()) for folder in (alone, on_two)]
    assert configs[0]["halfbyte"] == configs[1]["halfbyte"]


def test_the_adapter_loads_on_one_process_with_the_same_loss(on_two, settings) -> None:
    """As anybody would load it; the loss over all held-out tokens, which the run has logged at its end."""
    model = load_adapter(load_model(settings["base_model"], dtype=torch.float32), on_two / "adapter")
    data = load_data(build_config({**settings, "output_dir": "unused"}), tiny.tokenizer())
    total, count = 0.0, 0
    for row in data.held_out:
        ids, labels = (torch.tensor(row[key])[None] for key in ("input_ids", "labels"))
        tokens = int((labels[:, 1:] != -100).sum())
        total, count = total + model(input_ids=ids, labels=labels).loss.item() * tokens, count + tokens
    assert total / count == pytest.approx(metrics(on_two, "eval_loss")[-1], rel=1e-5)


def test_resumed_is_the_same_run_bit_for_bit(on_two, settings, tmp_path) -> None:
    out = tmp_path / "out"
    changes = {"resume_from_checkpoint": str(on_two / "checkpoint-3")}
    assert run(2, train_rank, settings, str(out), 2, changes) == ["", ""]
    assert_same_bits(out / "checkpoint-6", on_two / "checkpoint-6")
    assert metrics(out, "loss") == metrics(on_two, "loss")[3:]


def assert_same_bits(found: Path, expected: Path) -> None:
    """Adapter, and the optimizer's states of both ranks."""
    left, right = adapter_of(found), adapter_of(expected)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    for name in ("optimizer-0-of-2.pt", "optimizer-1-of-2.pt"):
        states = [torch.load(folder / name)["state"] for folder in (found, expected)]
        for i, state in states[1].items():
            assert all(torch.equal(states[0][i][key], value) for key, value in state.items())


def resumed_in_between(settings: dict[str, Any], folder: str, changes: dict[str, Any]) -> list[str]:
    resumed = changes | {"resume_from_checkpoint": f"{folder}/whole/checkpoint-2"}
    return [train_rank(settings, f"{folder}/whole", 2, changes), train_rank(settings, f"{folder}/resumed", 2, resumed)]


def test_low_bit_states_and_merged_weights_resume_bit_for_bit(settings, tmp_path) -> None:
    changes = {"optimizer": "adamw8bit", "lora_r": 64, "merge_aware": True, "max_steps": 4, "save_steps": 2}
    assert run(2, resumed_in_between, settings, str(tmp_path), changes) == [["", ""]] * 2
    assert_same_bits(tmp_path / "resumed" / "checkpoint-4", tmp_path / "whole" / "checkpoint-4")
    states = torch.load(tmp_path / "whole" / "checkpoint-4" / "optimizer-1-of-2.pt")["state"].values()
    assert any("exp_avg_scale" in state for state in states)


def test_two_by_two_equals_one(settings, tmp_path) -> None:
    """Without dropout, whose masks the two copies would draw for other rows."""
    changes = {"lora_dropout": 0.0, "optimizer": "adamw8bit", "lora_r": 64, "save_steps": None}
    alone = alone_on_one_thread(settings, tmp_path / "alone", changes)
    assert run(4, train_rank, settings, str(tmp_path / "four"), 2, changes) == [""] * 4
    for key in ("loss", "eval_loss", "grad_norm", "num_tokens"):
        assert metrics(tmp_path / "four", key) == pytest.approx(metrics(alone, key), rel=2e-4), key


def test_merge_aware_records_what_it_trained(settings, tmp_path) -> None:
    changes = {"merge_aware": True, "save_steps": None, "max_steps": 3}
    alone = alone_on_one_thread(settings, tmp_path / "alone", changes)
    assert run(2, train_rank, settings, str(tmp_path / "two"), 2, changes) == ["", ""]
    assert metrics(tmp_path / "two", "loss") == pytest.approx(metrics(alone, "loss"), rel=1e-3)
    found, expected = (
        json.loads((folder / "adapter" / "adapter_config.json").read_text())["halfbyte"]
        for folder in (tmp_path / "two", alone)
    )
    assert found["mode"] == "merge-aware" and len(found["merged_digest"]) == 64
    assert found["base_digest"] == expected["base_digest"] and found["quantizer"] == expected["quantizer"]


def without_weights(base: Path, folder: Path) -> Path:
    """The base with a header of its weights, and bytes behind it that no reader takes for block scales: all NaN."""
    bare = shutil.copytree(base, folder / "bare")
    whole = (base / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    (bare / "model.safetensors").write_bytes(whole[:header] + b"\xff" * (len(whole) - header))
    return bare


def test_refused_before_any_weight_is_loaded(on_two, settings, tmp_path) -> None:
    """Whatever read the weights would say first that they are damaged."""
    out, changes = str(tmp_path / "out"), {"base_model": str(without_weights(Path(settings["base_model"]), tmp_path))}
    zero, one = run(2, train_rank, settings, out, 4, changes | {"gradient_accumulation_steps": 1})
    assert zero == one and "degree is 4, but the launch has 2 processes" in zero
    zero, *_ = run(4, train_rank, settings, out, 4, changes)
    assert "num_key_value_heads is 2, expected a multiple of the 4 ranks" in zero


def train_as_accelerate_launches(settings: dict[str, Any], folder: str) -> tuple[str, str, str]:
    """With what `accelerate launch --use_parallelism_config --parallelism_config_tp_size 2` hands over."""
    asked = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    os.environ |= asked
    try:
        other_degree = train_rank(settings, f"{folder}/other", 1)
        same = train_rank(settings, f"{folder}/same", 2, {"max_steps": 2, "save_steps": None})
        os.environ["PARALLELISM_CONFIG_CP_SIZE"] = "2"
        return other_degree, same, train_rank(settings, f"{folder}/context", 2)
    finally:
        for name in (*asked, "PARALLELISM_CONFIG_CP_SIZE"):
            os.environ.pop(name, None)


def test_launched_with_accelerates_parallelism_config(alone, settings, tmp_path) -> None:
    for other_degree, same, context in run(2, train_as_accelerate_launches, settings, str(tmp_path)):
        assert "tp_size 2, but the run has tensor_parallel_size 1; set tensor_parallel_size: 2" in other_degree
        assert same == "" and "cp, sp sizes 1, 1, 2, 1, expected 1" in context
    assert metrics(tmp_path / "same", "loss")[0] == pytest.approx(metrics(alone, "loss")[0], rel=1e-5)


def train_on_own_rows(settings: dict[str, Any], output_dir: str, folders: list[str]) -> str:
    before = Path.cwd()
    os.chdir(folders[dist.get_rank()])
    try:
        return train_rank(settings, output_dir, 2, {"datasets": ["rows.jsonl"]})
    finally:
        os.chdir(before)


def test_ranks_with_other_data_are_refused(settings, tmp_path) -> None:
    """They would train whole factors apart; a rank may have an older copy of the file."""
    folders = [tmp_path / "zero", tmp_path / "one"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        tiny.write_lines(folder / "rows.jsonl", tiny.chat_rows(16 - number))
    zero, one = run(2, train_on_own_rows, settings, str(tmp_path / "out"), [str(folder) for folder in folders])
    assert zero == one and "rank 1 has training data" in zero and "the same data" in zero


@pytest.mark.parametrize("other", [{"deepspeed": "zero3.json"}, {"sample_prompts": ["What is 1 and 1?"]}])
def test_keys_that_do_not_go_together(other: dict[str, Any], settings) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(other))}.*tensor_parallel_size"):
        build_config({**settings, "output_dir": "out", "tensor_parallel_size": 2, **other})


def test_another_degree_does_not_continue_a_run(on_two, settings, tmp_path) -> None:
    changes = {"resume_from_checkpoint": str(on_two / "checkpoint-3")}
    text = train_rank(settings, str(tmp_path / "out"), 1, changes)
    assert "was written with tensor_parallel_size 2, this run has unset" in text


def torchrun(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "halfbyte"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def workers_of(launcher: subprocess.Popen) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone since
            parent = path.read_text().rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] if int(parent) == launcher.pid else []
    return found


def train_example(overrides: list[str], output_dir: str) -> None:
    train(load_config(EXAMPLE, [*overrides, f"output_dir={output_dir}"]))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_the_example_is_killed_and_resumed_by_the_same_command(settings, tmp_path) -> None:
    """A worker is killed after the first checkpoint; the second launch ends with the bits of a run left alone."""
    out = tmp_path / "killed"
    overrides = [f"base_model={settings['base_model']}", f"datasets.0.path={settings['datasets'][0]}"]
    overrides += ["val_set_size=4", "sequence_len=128", "gradient_accumulation_steps=2", "save_steps=2"]
    overrides += ["max_steps=16", "save_total_limit=null", "device=cpu"]
    command = ["train", str(EXAMPLE), *overrides, f"output_dir={out}"]
    launcher = torchrun(*command)
    while not resume.complete_checkpoints(out) and launcher.poll() is None:
        time.sleep(0.05)
    for pid in workers_of(launcher)[:1]:
        os.kill(pid, signal.SIGKILL)
    text, _ = launcher.communicate()
    assert launcher.returncode != 0 and not (out / "adapter").exists(), text[-3000:]
    again = torchrun(*command)
    text, _ = again.communicate()
    assert again.returncode == 0, text[-3000:]
    run(2, train_example, overrides, str(tmp_path / "whole"))
    assert_same_bits(out / "checkpoint-16", tmp_path / "whole" / "checkpoint-16")
    assert metrics(out, "loss") == metrics(tmp_path / "whole", "loss")
