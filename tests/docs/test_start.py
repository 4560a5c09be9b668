"""The ten-minute start does what it says: every block runs, in order, with a model of the user's own."""

import re
from pathlib import Path

from tests.test_readme import run_console
from tests.train import tiny

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def test_every_block_runs_in_order(tmp_path, monkeypatch, capsys) -> None:
    tiny.save_dense(tmp_path / "model")
    tiny.write_lines(tmp_path / "train.jsonl", tiny.chat_rows(40))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert [language for language, _ in blocks].count("console") >= 4
    for language, text in blocks:
        if language == "yaml":
            name = re.match(r"# (\S+)\n", text)
            assert name, text
            Path(name[1]).write_text(text)
        elif language == "console":
            run_console(text)
        elif language == "python":
            exec(compile(text, "start.md", "exec"), {"__name__": "__start__"})
        else:
            assert language == "json"
    for left in ("merged-nvfp4/halfbyte.json", "runs/first/report.html", "served/model.safetensors"):
        assert Path(left).exists(), left
    report = Path("runs/first/report.html").read_text()
    for shown in ("Loss", "Memory by kind", "Sample answers", "Kept by the merge", "Quantization error", "Versions"):
        assert f">{shown}<" in report, shown
