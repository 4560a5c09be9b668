"""What is tested, engine by engine: which tests stand behind each cell of docs/support.md, and the page made of them.

    python -m tests.docs.support [pytest options]     runs those tests, keeps what came out, writes the page
    pytest -p tests.docs.support ...                  keeps what came out of any other run of them

A cell is tested (its tests passed), refused (a test meets the sentence that refuses it), or not run, with the reason.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUTCOMES = Path(__file__).with_name("support.json")
PAGE = ROOT / "docs" / "support.md"
ENGINES = ("one process", "DDP", "FSDP2", "HSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel")

P, T, L, C = "tests/parallel/test_", "tests/train/test_", "tests/lora/test_", "tests/checkpoint/test_"
MATRIX = P + "matrix.py::test_equals_one_process"
NO_GPU = "the tests run on CPUs with gloo; on GPUs the scripts in benchmarks/ compare, see the results"
SAME_AS_DDP = "the whole model is on every rank, and the code is DDP's"
DEEPSPEED_RESUME = "DeepSpeed resumes on the same number of ranks only"


def matrix(mode: str) -> dict[str, list[str] | str]:
    """The cells of FSDP2 and ZeRO in one mode."""
    names = {"FSDP2": "fsdp2", "HSDP": "hsdp", "ZeRO-1": "zero1", "ZeRO-2": "zero2", "ZeRO-3": "zero3"}
    return {engine: [f"{MATRIX}[{name}-{mode}]"] for engine, name in names.items()}


def zero(test: str) -> dict[str, list[str] | str]:
    """The cells of ZeRO of a test that takes the stage as its first parameter."""
    return {f"ZeRO-{stage}": [f"{test}[{stage}*]"] for stage in (1, 2, 3)}


# row -> column -> tests (`file::function`, or with the beginning of its parameters, `[zero1-*]`), or why there is none.
# A row's name ends with "(refused)" where its tests meet a refusal.
ROWS: dict[str, dict[str, list[str] | str]] = {
    "plain LoRA": {
        "one process": [L + "peft.py::test_training_equals_training_over_the_decoded_weights"],
        "DDP": [P + "ddp.py::test_two_ranks_equal_one_process", P + "ddp.py::test_four_ranks_equal_one_process"],
        **matrix("plain"),
        "tensor parallel": [P + "tensor_parallel.py::test_equals_one_process"],
    },
    "dynamic activations": {
        "one process": [L + "merge_aware.py::test_gradients_against_the_formulas"],
        "DDP": "no rank sees another's batch, as in one process",
        **matrix("dynamic"),
        "tensor parallel": [P + "tensor_parallel.py::test_dynamic_activations_take_the_scale_of_the_whole_input"],
    },
    "merge-aware LoRA": {
        "one process": [L + "merge_aware.py::test_forward_is_the_merged_model"],
        "DDP": [L + "merge_aware_ddp.py"],
        **matrix("merge-aware"),
        "tensor parallel": [P + "tp_merge_aware.py::test_five_steps"],
    },
    "AdamW8bit, AdamW4bit, AdamWFp8": {
        "one process": [T + "resume.py::test_low_bit_states_are_restored_bit_for_bit"],
        "DDP": [P + "ddp_optim.py::test_states_are_equal_on_all_ranks"],
        **matrix("plain"),
        "tensor parallel": [P + "tp_optim.py::test_equals_one_process_where_blocks_align"],
    },
    "gradient checkpointing": {
        "one process": [L + "peft.py::test_gradient_checkpointing"],
        "DDP": [P + "ddp.py::test_two_ranks_equal_one_process[checkpointing*]"],
        "FSDP2": [P + "fsdp2.py::test_two_ranks_equal_one_process[checkpointing*]"],
        "HSDP": "FSDP2's code; what differs is the communication",
        **zero(P + "deepspeed.py::test_gradient_checkpointing"),
        "tensor parallel": "recomputes the layers that the other rows compare",
    },
    "the adapter's files are those of one process": {
        "one process": [T + "trainer.py::test_the_adapter_loads_by_plain_peft_and_gives_the_loss_that_was_reported"],
        "DDP": [P + "gather.py::test_files_are_those_of_one_process[ddp-*]"],
        "FSDP2": [P + "gather.py::test_files_are_those_of_one_process[fsdp2-*]"],
        "HSDP": "FSDP2's code; what differs is the communication",
        "ZeRO-1": SAME_AS_DDP,
        "ZeRO-2": [P + "gather.py::test_files_are_those_of_one_process[zero2-*]"],
        "ZeRO-3": [P + "gather.py::test_files_are_those_of_one_process[zero3-*]"],
        "tensor parallel": [P + "tp_merge_aware.py::test_metadata_and_files_are_those_of_one_process"],
    },
    "save, resume": {
        "one process": [T + "resume.py::test_resumed_equals_uninterrupted"],
        "DDP": [P + "train_ddp.py::test_killed_while_saving_and_resumed_is_the_same_run"],
        "FSDP2": [P + "fsdp2_checkpoint.py::test_saved_on_two_loaded_on_two_and_four"],
        "HSDP": "FSDP2's code; what differs is the communication",
        **zero(P + "deepspeed_states.py::test_resumed_equals_uninterrupted"),
        "tensor parallel": [P + "tensor_parallel.py::test_saved_on_two_loaded_on_one_and_four"],
    },
    "resume on another number of ranks": {
        "one process": [P + "train_ddp.py::test_resumed_on_one_rank"],
        "DDP": [P + "train_ddp.py::test_resumed_on_four_ranks"],
        "FSDP2": [P + "fsdp2_checkpoint.py::test_saved_on_two_loaded_by_one_process_and_by_ddp"],
        "HSDP": "FSDP2's code; what differs is the communication",
        **{f"ZeRO-{stage}": DEEPSPEED_RESUME for stage in (1, 2, 3)},
        "tensor parallel": [P + "tensor_parallel.py::test_saved_on_two_loaded_on_one_and_four"],
    },
    "`halfbyte train`": {
        "one process": [T + "trainer.py::test_what_is_left"],
        "DDP": [P + "train_ddp.py::test_two_ranks_equal_one"],
        "FSDP2": [P + "train_fsdp.py::test_two_ranks_equal_one"],
        "HSDP": [P + "train_fsdp.py::test_options[no reshard, HSDP]"],
        **zero(P + "train_sharded.py::test_two_ranks_equal_a_run_without_deepspeed_and_resume"),
        "tensor parallel": [P + "train_tensor_parallel.py::test_two_ranks_equal_one"],
    },
    "PEFT's own merge (refused)": {
        "one process": [L + "peft.py::test_merging_in_memory_is_refused"],
        **dict.fromkeys(ENGINES[1:], "the layer refuses it, whatever wraps it"),
    },
    "what the engine cannot do (refused)": {
        "one process": [L + "merge_aware_refusals.py"],
        "DDP": [P + "train_ddp.py::test_ranks_with_other_configs_are_refused_on_all"],
        "FSDP2": [P + "fsdp2.py::test_refusals"],
        "HSDP": "as FSDP2",
        **dict.fromkeys(("ZeRO-1", "ZeRO-2", "ZeRO-3"), [P + "deepspeed.py::test_refused_configs"]),
        "tensor parallel": [P + "tp_refusals.py::test_refused_on_a_model_without_weights"],
    },
    "on GPUs, with NCCL": dict.fromkeys(ENGINES, NO_GPU),
}


def references() -> list[str]:
    """Every reference to tests in the table, once."""
    cells = (cell for row in ROWS.values() for cell in row.values() if not isinstance(cell, str))
    return list(dict.fromkeys(reference for cell in cells for reference in cell))


def matches(reference: str, node_id: str) -> bool:
    """Whether a test is one of those that a reference means."""
    if "[" not in reference:
        return node_id.partition("[")[0] == reference or node_id.partition("::")[0] == reference
    wanted, parameters = reference.rstrip("]").split("[", 1)
    name, _, given = node_id.rstrip("]").partition("[")
    return name == wanted and (given.startswith(parameters[:-1]) if parameters.endswith("*") else given == parameters)


def exists(reference: str) -> bool:
    """Whether the file is there, and has the function."""
    file, _, function = reference.partition("[")[0].partition("::")
    if not (ROOT / file).is_file():
        return False
    tree = ast.parse((ROOT / file).read_text())
    return not function or function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


# ---- what came out


class Keeper:
    """The pytest plugin: counts, for each reference, what its tests did in this run, and writes it down as it goes."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for reference in references():
            if matches(reference, report.nodeid):
                counts = self.found.setdefault(reference, {"passed": 0, "failed": 0, "skipped": 0})
                counts[report.outcome] += 1
                self.write()

    def write(self) -> None:
        kept = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
        kept = {reference: kept[reference] for reference in references() if reference in kept} | self.found
        OUTCOMES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(kept))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Keeper())


# ---- the page


def page(outcomes: dict[str, dict[str, int]]) -> str:
    """docs/support.md."""
    notes: list[str] = []
    head = f"| | {' | '.join(ENGINES)} |\n|---|{'---|' * len(ENGINES)}"
    rows = []
    for name, row in ROWS.items():
        refused = name.endswith("(refused)")
        cells = [shown(row.get(engine, "no test"), outcomes, refused, notes) for engine in ENGINES]
        rows.append(f"| {name.removesuffix(' (refused)')} | {' | '.join(cells)} |")
    footnotes = [f"{number}. not run: {note}." for number, note in enumerate(notes, 1)]
    return "\n".join([INTRODUCTION, head, *rows, "", *footnotes, "", "## The tests behind each cell", "", *behind()])


INTRODUCTION = """# What is tested

Made from a test run by `make support`, on CPUs with gloo; a number is the count of test cases that passed. "Refused": a
test meets the sentence that refuses it. A number in brackets leads to the reason why there is no test.
"""


def shown(cell: list[str] | str, outcomes: dict[str, dict[str, int]], refused: bool, notes: list[str]) -> str:
    """One cell of the table; a reason becomes a note."""
    if isinstance(cell, str):
        return note_of(cell, notes)
    counts = [outcomes.get(reference, {}) for reference in cell]
    if any(count.get("failed") for count in counts):
        return "**failed**"
    if not all(count.get("passed") for count in counts):
        return note_of("these tests were left out of the recorded run", notes)
    passed = sum(count["passed"] for count in counts)
    return f"{'refused' if refused else 'tested'} {passed}"


def note_of(reason: str, notes: list[str]) -> str:
    if reason not in notes:
        notes.append(reason)
    return f"({notes.index(reason) + 1})"


def behind() -> list[str]:
    """A list of the tests, by row."""
    lines = []
    for name, row in ROWS.items():
        tests = dict.fromkeys(r for cell in row.values() if not isinstance(cell, str) for r in cell)
        if tests:
            names = ", ".join("`" + test.removeprefix("tests/") + "`" for test in tests)
            lines.append(f"* {name}: {names}")
    return [*lines, ""]


def main() -> int:
    """Run the tests of the table."""
    functions = list(dict.fromkeys(reference.partition("[")[0] for reference in references()))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.docs.support", *functions, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
