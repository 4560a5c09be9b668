"""`halfbyte quantize` from the command line: what a user can do wrong is one sentence, exit code 2, nothing lost."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.cli.main import main
from tests.train import tiny


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("quantize") / "dense"
    AutoModelForCausalLM.from_config(tiny.model_config(), dtype=torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in args])
    return int(left.value.code or 0)


def test_table(tmp_path: Path, dense: Path, capsys: Any) -> None:
    assert run("quantize", dense, tmp_path / "out", "--scales", "four-over-six", "--exclude", "o_proj") == 0
    text = capsys.readouterr().out
    for line in ("layers in NVFP4", "size before", "size after", "relative error, mean", "the same with plain scales"):
        assert line in text
    assert "model.layers.0.self_attn.o_proj (excluded by 'o_proj')" in text
    assert (tmp_path / "out" / "tokenizer.json").exists()


def bad(dense: Path, root: Path) -> dict[str, tuple[list[object], str]]:
    (root / "full").mkdir()
    (root / "full" / "file").touch()
    (root / "empty").mkdir()
    return {
        "missing source": ([root / "nowhere", root / "out"], "no such file or folder"),
        "no model": ([root / "empty", root / "out"], "config.json: not there"),
        "output not empty": ([dense, root / "full"], "already there and not an empty folder"),
        "output under a file": ([dense, root / "full" / "file" / "out"], "cannot be written here"),
        "pattern": ([dense, root / "out", "--exclude", "q_prj"], "Did you mean 'q_proj'"),
        "scales": ([dense, root / "out", "--scales", "best"], "expected max or four-over-six"),
    }


@pytest.mark.parametrize(
    "case", ["missing source", "no model", "output not empty", "output under a file", "pattern", "scales"]
)
def test_bad_input(tmp_path: Path, dense: Path, case: str, capsys: Any) -> None:
    arguments, message = bad(dense, tmp_path)[case]
    before = sorted(tmp_path.rglob("*"))
    assert run("quantize", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and len(error.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_disk_full(tmp_path: Path, dense: Path, capsys: Any) -> None:
    """A limit on the file size stands in for a full disk (EFBIG for ENOSPC): noticed before a weight is read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        code = run("quantize", dense, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert code == 2 and "the disk is full" in error and "Nothing was left behind" in error
    assert not any(tmp_path.iterdir())
