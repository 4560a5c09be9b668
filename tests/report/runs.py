"""Folders of runs, written by hand: the report must hold without a run of two minutes for every test."""

import json
import math
from pathlib import Path
from typing import Any

PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
PROJECTIONS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> & \"quotes\" $x$ \u202e\x00"


def layer_values(layers: int, low: float, high: float) -> dict[str, float]:
    """A value for each projection, different for each."""
    names = [f"model.layers.{index}.{name}" for index in range(layers) for name in PROJECTIONS]
    return {name: round(low + (high - low) * (i * 37 % 101) / 100, 6) for i, name in enumerate(names)}


def metrics(steps: int, rate: float) -> list[dict[str, Any]]:
    """Rows as `halfbyte train` writes them, with numbers that all differ."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval_loss": 4.3125}]
    for step in range(1, steps + 1):
        loss = 2.5 + 1.8 * math.exp(-step / 12) + 0.13 * math.sin(step * 1.7)
        row = {"loss": loss, "grad_norm": 1.5 + math.sin(step), "learning_rate": rate * (1 - step / (steps + 1))}
        rows.append({"step": step, **row, "tokens_per_second": 900 + 40 * math.cos(step), "memory_gb": 1.75})
        if step % 10 == 0:
            rows.append({"step": step, "eval_loss": loss + 0.11})
    return rows


def write_run(folder: Path, *, steps: int = 40, rate: float = 1e-3, finished: bool = True, layers: int = 6) -> Path:
    """A run with everything a report can show but a merge."""
    folder.mkdir(parents=True)
    rows = metrics(steps, rate)
    if finished:
        rows.append({"step": steps, "train_runtime": 100.0, "train_loss": 2.9})
    write_rows(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(
        f"base_model: base-nvfp4\nlearning_rate: {rate}\noptimizer: adamw8bit\nseed: 42\n"
    )
    (folder / "versions.json").write_text(json.dumps({"python": "3.11.2", "torch": "2.13.0", "halfbyte": "0.1.0"}))
    memory = {"base": 117_000_000, "adapter": 19_500_000, "gradients": 19_500_000, "optimizer": 39_000_000}
    (folder / "memory.json").write_text(json.dumps(memory))
    (folder / "base.json").write_text(json.dumps({"errors": layer_values(layers, 0.088, 0.104)}))
    answers = {0: "Python is a large snake.", steps: "It returns the value of the named attribute."}
    prompts = ["What does getattr do?", "What does os.replace do, and when is it atomic?"]
    samples = [{"step": step, "prompt": p, "answer": answer} for step, answer in answers.items() for p in prompts]
    write_rows(folder / "samples.jsonl", samples)
    (folder / "adapter").mkdir()
    for step in (steps // 2, steps):
        write_checkpoint(folder / f"checkpoint-{step}", step)
    return folder


def write_checkpoint(folder: Path, step: int) -> None:
    """A complete one of 2 MB."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes(2_000_000))
    marker = {"step": step, "run": {}, "files": {"adapter_model.safetensors": 2_000_000}}
    (folder / "halfbyte_checkpoint.json").write_text(json.dumps(marker))


def write_merged(folder: Path, *, low: float = 0.93, layers: int = 6) -> Path:
    """The record of a merge; the weights do not matter here."""
    folder.mkdir(parents=True)
    kept = layer_values(layers, low, 1.01)
    record = {
        "made_by": "merge",
        "to": "nvfp4",
        "rounding": "dither",
        "block_scales": "keep",
        "seed": 0,
        "retained": 0.97,
    }
    figures = {
        name: {"as": "nvfp4", "kept": value, "noise": 1.2, "relative_delta": 0.01} for name, value in kept.items()
    }
    (folder / "halfbyte.json").write_text(json.dumps({**record, "layers": figures}))
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
