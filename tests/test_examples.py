"""Every example runs: YAML files load, scripts train, and the quickstart does the whole job in its short form."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.train.config import load_config
from tests.train import tiny

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def run_script(monkeypatch):
    """Runs an example in this process, as `python examples/NAME ARGUMENTS` would."""

    def run(name: str, *arguments: Path) -> None:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_yaml_loads(path) -> None:
    assert load_config(path).base_model


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("train_from_python.py", tiny.chat_rows(20)),
        ("own_trl_script.py", tiny.chat_rows(20)),
        ("own_trainer.py", [{"text": f"the sum of {number}"} for number in range(20)]),
    ],
)
def test_script_trains_an_adapter(name, rows, base, run_script, tmp_path, capsys) -> None:
    data = tiny.write_lines(tmp_path / "rows.jsonl", rows)
    run_script(name, base, data, tmp_path / "out")
    assert list((tmp_path / "out").rglob("adapter_model.safetensors"))
    assert "adapter in" in capsys.readouterr().out


def test_the_quickstarts_data_is_the_same_every_time_and_does_not_leak(tmp_path, run_script) -> None:
    """1,104 pairs to train on and 96 held out, no question or answer on both sides."""
    run_script("docstrings.py", tmp_path / "one")
    run_script("docstrings.py", tmp_path / "two")
    texts = {name: (tmp_path / "one" / name).read_text() for name in ("train.jsonl", "heldout.jsonl")}
    assert texts == {name: (tmp_path / "two" / name).read_text() for name in texts}
    train, heldout = ([json.loads(line)["messages"] for line in text.splitlines()] for text in texts.values())
    assert (len(train), len(heldout)) == (1104, 96)
    for turn in (0, 1):
        assert not {chat[turn]["content"] for chat in train} & {chat[turn]["content"] for chat in heldout}


def test_a_killed_training_is_a_sentence(capsys) -> None:
    """What a kernel without memory leaves of it: no output, a signal."""
    quickstart = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    kill = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(SystemExit) as leaving:
        quickstart["command"](sys.executable, "-c", kill, "train", shown=["halfbyte", "train"])
    assert leaving.value.code == 1
    assert "training ended by signal 9 (often: out of memory)" in capsys.readouterr().out


@pytest.mark.timeout(1800)
def test_quickstart(tmp_path) -> None:
    """The whole job on SmolLM2-135M, in its short form; the script itself fails when the held-out loss did not fall."""
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), "--short", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for shown in ("$ halfbyte quantize", "$ halfbyte train", "$ halfbyte merge", "held-out loss, merged NVFP4 file"):
        assert shown in done.stdout
    for left in ("run/adapter/adapter_model.safetensors", "merged-nvfp4/model.safetensors", "run/loss.png"):
        assert (tmp_path / "out" / left).exists()
