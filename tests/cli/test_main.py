"""The command's frame: light to start, verbs loaded on demand, errors as one sentence with exit code 2."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from halfbyte.cli import main as cli

HEAVY = {"torch", "transformers", "peft", "trl", "datasets", "numpy"}


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    return int(leaving.value.code or 0)


def verb_that_raises(error: BaseException) -> Callable[..., None]:
    def train(config: str) -> None:
        raise error

    return train


def test_help_lists_the_verbs_and_imports_nothing_heavy() -> None:
    """One process: `python -m halfbyte --help` works, and none of the slow packages is loaded on the way."""
    code = (
        "import sys, runpy; sys.argv = ['halfbyte', '--help']\n"
        "try: runpy.run_module('halfbyte', run_name='__main__')\n"
        "except SystemExit as leaving: assert not leaving.code, leaving.code\n"
        f"print('HEAVY', sorted({HEAVY!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in cli.VERBS)
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, OSError, RuntimeError, ImportError])
def test_user_errors_are_one_line_and_exit_2(error, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "load_verb", lambda verb: verb_that_raises(error("found this.\n  Expected that.")))
    assert run(["train", "x.yaml"]) == 2
    assert capsys.readouterr().err == "error: found this. Expected that.\n"


def test_traceback_on_request_anywhere_on_the_line(monkeypatch) -> None:
    monkeypatch.setattr(cli, "load_verb", lambda verb: verb_that_raises(ValueError("bad")))
    for argv in (["--traceback", "train", "x"], ["train", "x", "--traceback"]):
        with pytest.raises(ValueError, match="bad"):
            cli.main(argv)


def test_our_own_mistakes_keep_their_traceback(monkeypatch) -> None:
    monkeypatch.setattr(cli, "load_verb", lambda verb: verb_that_raises(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.main(["train", "x"])


def test_unknown_verb_names_the_nearest(capsys) -> None:
    assert run(["quantise"]) == 2
    assert "quantize" in capsys.readouterr().err


def test_missing_package_names_the_extra(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'trl'", name="trl")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"'trl'.*halfbyte\[train\]"):
        cli.load_verb("train")


def test_version(capsys) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("halfbyte ")
