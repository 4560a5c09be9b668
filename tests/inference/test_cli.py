"""generate, chat and eval without a terminal: pipes in, pipes out, mistakes in one sentence."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli.main import main
from halfbyte.inference import tasks


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Puts lines on standard input."""

    def put(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return put


SHORT = ("--max-new-tokens", 6, "--device", "cpu")


def test_generate_from_option_and_from_a_pipe(base: Path, say: Any, capsys: Any) -> None:
    assert run("generate", base, "--prompt", "What is the sum?", *SHORT) == 0
    by_option = capsys.readouterr().out
    say("What is the sum?\n")
    assert run("generate", base, *SHORT) == 0
    assert capsys.readouterr().out == by_option != "\n"
    assert run("generate", base, "--prompt", "the sum", "--raw", "--temperature", 0.9, "--seed", 3, *SHORT) == 0
    assert run("generate", base, "--prompt", "a", "--prompt", "b", "--system", "Be brief.", *SHORT) == 0
    assert capsys.readouterr().out.count("\n> b\n") == 1


def test_generate_with_two(base: Path, adapter: Path, capsys: Any) -> None:
    arguments = ("--prompt", "What is 1 and 1?", "--adapter", adapter, "--compare", "base")
    assert run("generate", base, *arguments, *SHORT) == 0
    parts = capsys.readouterr().out.split("== ")
    assert [part.splitlines()[0] for part in parts[1:]] == [str(base), str(adapter)]
    answers = [part.partition("\n")[2].strip() for part in parts[1:]]
    assert answers[0] != answers[1]
    assert run("generate", base, "--prompt", "What is 1 and 1?", *SHORT) == 0
    assert capsys.readouterr().out.strip() == answers[0]


def test_chat_remembers_and_forgets(base: Path, adapter: Path, say: Any, capsys: Any) -> None:
    """The third question gets the first one's answer again after /reset, and another one in between."""
    say("What is the sum?\nWhat is the sum?\n/reset\nWhat is the sum?\n")
    assert run("chat", base, adapter, *SHORT) == 0
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first == third and first != second
    say("hello\n\nnever read\n")
    assert run("chat", base, adapter, "--compare", "base", *SHORT) == 0
    assert capsys.readouterr().out.count("== ") == 2


def test_eval_as_table_and_as_json(base: Path, adapter: Path, rows: Path, result: Any, capsys: Any) -> None:
    arguments = ("--data", rows, "--sequence-len", 40, "--batch-size", 3, "--device", "cpu")
    assert run("eval", base, "--adapter", adapter, *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)["held_out"]
    assert found[1]["loss"] == result.loss_after and found[0]["name"] == "base"
    assert run("eval", base, *arguments) == 0
    assert f"{result.loss_before:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{base}", "--prompt", "x", "--adapter", "{other}"], "expected a PEFT adapter"),
        (["generate", "{base}", "--prompt", "x", "--temperature", "-1"], "out of range"),
        (["generate", "{base}", "--prompt", "x", "--raw", "--system", "y"], "leave one of them out"),
        (["generate", "{base}"], "no prompt"),
        (["generate", "{base}", "--prompt", "x", "--device", "tpu"], "expected auto, cpu or cuda"),
        (["chat", "{other}", "{adapter}"], "trained on another base"),
        (["chat", "/nowhere"], "no such file or folder"),
        (["eval", "{base}"], "nothing to evaluate"),
        (["eval", "{base}", "--data", "/nowhere.jsonl"], "no such data file"),
    ],
)
def test_bad_input(base: Path, adapter: Path, other: Path, say: Any, capsys: Any, arguments, message) -> None:
    say("")
    filled = [part.format(base=base, adapter=adapter, other=other) for part in arguments]
    assert run(*filled) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_no_chat_template(base: Path, tmp_path: Path, capsys: Any) -> None:
    import shutil

    folder = shutil.copytree(base, tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    assert run("generate", folder, "--prompt", "x", *SHORT) == 2
    assert "no chat template" in capsys.readouterr().err
    assert run("chat", folder, *SHORT) == 2
    assert "no chat template" in capsys.readouterr().err


def test_tasks_without_the_package(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    assert run("eval", base, "--tasks", "arc_easy") == 2
    assert "needs the package lm-eval" in capsys.readouterr().err
