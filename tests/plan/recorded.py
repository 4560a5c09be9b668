# ruff: noqa: E501 -- one run a line
"""Every recorded run with a stated size, as a test of the planner's arithmetic; docs/planning.md lists them.

    python -m tests.plan.recorded      # prints the table for docs/planning.md

A run is named by the line of benchmarks/results/ that records it, so a number cannot drift from where it was measured.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LlamaConfig

from benchmarks import peak_memory_engines as engines
from benchmarks.peak_memory import CPU_CASES, GPU_CASES, planned
from halfbyte.plan.disk import plan_disk
from halfbyte.plan.engine import Engine
from halfbyte.plan.memory import plan_memory
from halfbyte.plan.read import read_shape
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import ModelShape

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
# benchmarks/llama8b.py: 4 x 2048 tokens in a loop of its own
EIGHT_B = Settings(
    micro_batch_size=4,
    gradient_checkpointing=True,
    optimizer="adamw_torch_fused",
    loss="logits",
    autocast=False,
    padded=False,
)
# examples/quickstart.yaml: 8 examples, cut at 128 tokens
QUICKSTART = Settings(micro_batch_size=8, sequence_len=128, bf16=False, device="cpu")


@dataclass(frozen=True)
class Recorded:
    """A run. text: a regular expression whose group is the recorded number, in units of `unit` bytes."""

    name: str
    file: str
    text: str
    unit: float
    plan: Callable[[], float]

    @property
    def measured(self) -> float:
        found = re.search(self.text, (RESULTS / self.file).read_text())
        assert found, f"{self.file} has no {self.text}"
        return float(found.group(1).replace(",", "")) * self.unit


def shape(config: LlamaConfig, settings: Settings) -> ModelShape:
    return read_shape(config, Path("recorded"), settings)


def peak(config: LlamaConfig, settings: Settings) -> float:
    return plan_memory(shape(config, settings), settings, Engine()).peak


def loaded(config: LlamaConfig, settings: Settings) -> float:
    """Base and adapters, before an optimizer."""
    memory = plan_memory(shape(config, settings), settings, Engine())
    return memory.base + memory.adapters


def base(settings: Settings) -> float:
    return shape(SMOLLM2, settings).base_bytes(settings.width)


H200, QUICK, LOAD = "2026-12-01-linear-h200.md", "quickstart.md", "load_peak.md"
DENSE = replace(EIGHT_B, packed=False, forward="peft")
ROW = r"\| [\d.]+ \| \d+ \| [\d.]+ \| "
RUNS = [
    Recorded("8B on an H200, NVFP4, fused: peak", H200, rf"`fuse` {ROW}[\d.]+ \| ([\d.]+) ", 1e9, lambda: peak(LLAMA_8B, EIGHT_B)),
    Recorded("... merge-aware: peak", H200, rf"recomputed\) {ROW}[\d.]+ \| ([\d.]+) ", 1e9, lambda: peak(LLAMA_8B, replace(EIGHT_B, forward="merge-aware"))),
    Recorded("... PEFT's forward: peak", H200, rf"PEFT's forward {ROW}[\d.]+ \| ([\d.]+) ", 1e9, lambda: peak(LLAMA_8B, replace(EIGHT_B, forward="peft"))),
    Recorded("... dense bf16 base: peak", H200, rf"dense bf16, PEFT {ROW}[\d.]+ \| ([\d.]+) ", 1e9, lambda: peak(LLAMA_8B, DENSE)),
    Recorded("... NVFP4: model as loaded", H200, rf"`fuse` {ROW}([\d.]+) ", 1e9, lambda: loaded(LLAMA_8B, EIGHT_B)),
    Recorded("... dense: model as loaded", H200, rf"dense bf16, PEFT {ROW}([\d.]+) ", 1e9, lambda: loaded(LLAMA_8B, DENSE)),
    Recorded("8B on two H200, DDP: what travels", "2026-12-01-ddp-h200x2.md", r"packed parameters, ([\d.]+) GB", 1e9, lambda: loaded(LLAMA_8B, EIGHT_B)),
    Recorded("SmolLM2 quickstart on a CPU: peak of the process", QUICK, r"training process ([\d.]+) GB", 1e9, lambda: peak(SMOLLM2, QUICKSTART)),
    Recorded("SmolLM2, bf16: model as loaded", LOAD, r"SmolLM2-135M in NVFP4 \| bf16 \| ([\d.]+) MB", 1e6, lambda: base(replace(QUICKSTART, bf16=True))),
    Recorded("SmolLM2, fp32: model as loaded", LOAD, r"SmolLM2-135M in NVFP4 \| fp32 \| ([\d.]+) MB", 1e6, lambda: base(QUICKSTART)),
    Recorded("SmolLM2: NVFP4 base on disk", QUICK, r"NVFP4 base ([\d.]+) MB", 1e6, lambda: plan_disk(shape(SMOLLM2, QUICKSTART), QUICKSTART).base),
    Recorded("SmolLM2: adapter on disk", QUICK, r"adapter ([\d.]+) MB", 1e6, lambda: plan_disk(shape(SMOLLM2, QUICKSTART), QUICKSTART).adapter),
    Recorded("SmolLM2: merged bf16 on disk", QUICK, r"merged bf16 ([\d.]+) MB", 1e6, lambda: plan_disk(shape(SMOLLM2, QUICKSTART), QUICKSTART).merged_bf16),
]  # fmt: skip


def of_benchmark(file: str, unit: float) -> list[Recorded]:
    """The runs of benchmarks/peak_memory.py, planned anew."""
    if not (RESULTS / file).exists():
        return []
    device = "an H200" if unit == 1e9 else "a CPU"
    return [
        Recorded(f"{case.name} ({device})", file, rf"\| {re.escape(case.name)} \| ([\d.]+) ", unit, lambda case=case: planned(case).peak)
        for case in (GPU_CASES if unit == 1e9 else CPU_CASES)
    ]  # fmt: skip


CPU_FILE, GPU_FILE = "2026-12-01-peak-memory-cpu.md", "2026-12-01-peak-memory-h200.md"
RUNS += of_benchmark(CPU_FILE, 1e6) + of_benchmark(GPU_FILE, 1e9)


def of_engines() -> list[Recorded]:
    """The runs of benchmarks/peak_memory_engines.py on two CPU processes, planned anew."""
    found = []
    for case, engine in engines.runs(engines.SMALL_CASE, 2):
        on = engines.checkpoints(case)
        name = f"{engine.name}{', checkpointing' if on == 'on' else ''} (two CPU processes)"
        text = rf"\| {engine.name} \| {on} \| [\d.]+ \| [\d.]+ \| ([\d.]+) "
        plan = lambda case=case, engine=engine: engines.planned(case, engine).peak  # noqa: E731
        found.append(Recorded(name, "2026-12-01-peak-memory-engines-cpu.md", text, 1e6, plan))
    return found


RUNS += of_engines()


def size(number: float, unit: float) -> str:
    return f"{number / unit:.2f} {'GB' if unit == 1e9 else 'MB'}"


def row(run: Recorded) -> str:
    """One line of the table in docs/planning.md."""
    found, planned_bytes = run.measured, run.plan()
    error = planned_bytes / found - 1
    link = f"[results](../benchmarks/results/{run.file})"
    return f"| {run.name} | {size(found, run.unit)} | {size(planned_bytes, run.unit)} | {error:+.1%} | {link} |"


def table() -> str:
    return "\n".join(["| run | recorded | planned | error | |", "|---|---|---|---|---|", *map(row, RUNS)])


if __name__ == "__main__":
    print(table())
