"""What the report reads and writes, without a browser: damaged folders, two runs, many steps, a run that goes on."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from halfbyte.cli.main import main
from halfbyte.report import watch, write_report
from halfbyte.report.charts import thinned
from halfbyte.report.html import tag
from halfbyte.report.read import read_run
from tests.report import runs


class Text(HTMLParser):
    """The page's text, and that every element which is opened is closed in order."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes) -> None:
        if name not in ("meta", "br"):
            self.open.append(name)

    def handle_startendtag(self, name, attributes) -> None:
        pass

    def handle_endtag(self, name) -> None:
        assert self.open.pop() == name

    def handle_data(self, data) -> None:
        self.text += data


def text_of(path) -> str:
    return Text(path.read_text()).text


def test_text_becomes_no_markup() -> None:
    assert tag("td", "<b>", 3, None, [tag("i", "&")], title='"x"') == (
        '<td title="&quot;x&quot;">&lt;b&gt;3<i>&amp;</i></td>'
    )
    assert tag("p", "\x00\ud800\n") == "<p>\ufffd\ufffd\n</p>"


def test_an_empty_folder_is_a_run_that_begins(tmp_path) -> None:
    path, (run,) = write_report(tmp_path)
    assert "Nothing has been recorded yet." in text_of(path) and not run.finished
    assert write_report(tmp_path)[0] == path  # its own report makes it no other folder


def test_a_folder_of_something_else_is_refused(tmp_path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds no run"):
        write_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder; give the output_dir"):
        write_report(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


DAMAGE = {
    "metrics.jsonl": [b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"step": 1, "loss": 2.5}\n{"step": 2, "lo'],
    "config.yaml": [
        b"",
        b"a: [",
        b"- just\n- a list",
        b"\xff\xff",
        b"&a [*a]",
        b"x: 2026-01-01\ny: !!python/object:os.x {}",
    ],
    # endless, and a gigabyte when written out
    "config.yaml, aliases": [
        b"x: &x [*x]",
        b"a: &a [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in b"bcdefghij"),
        b"{[1, 2]: 3, x: {[1]: 2}}",
        b"x: !!set {a, b}",
    ],
    "versions.json": [b"", b"3", b"{", b"[" * 100_000],
    "memory.json": [b'{"base": "many", "optimizer": null, "adapter": true}', b"[]"],
    "base.json": [
        b'{"errors": 3}',
        b'{"errors": {"a": "b", "c": 1e999, "": 0.1}}',
        b'{"errors": {"x.layers.99999999999.q": 1}}',
    ],
    "samples.jsonl": [b'{"step": "x", "prompt": 1, "answer": null}', b'{"step": 0, "prompt": [], "answer": {}}'],
}


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, all_ in DAMAGE.items() for content in all_])
def test_a_damaged_file_leaves_a_report_of_the_rest(name, content, tmp_path) -> None:
    folder = runs.write_run(tmp_path / "run")
    (folder / name.partition(",")[0]).write_bytes(content)
    path, _ = write_report(folder)
    assert "checkpoint-40" in text_of(path)


def test_what_could_not_be_read_is_said(tmp_path) -> None:
    folder = runs.write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("a: [")
    (folder / "versions.json").write_text("[]")
    text = text_of(write_report(folder)[0])
    assert "config.yaml could not be read (ParserError)" in text
    assert "versions.json holds list, expected a mapping" in text


def test_what_is_no_number_is_left_out(tmp_path) -> None:
    """null for NaN is what the trainer writes; the rest is what others may."""
    folder = runs.write_run(tmp_path / "run")
    values = [2.0, None, math.nan, math.inf, "3", True, 10**400, [1], {"a": 1}, 1.0]
    runs.write_rows(folder / "metrics.jsonl", [{"step": i, "loss": value} for i, value in enumerate(values)])
    assert read_run(folder).series("loss") == [(0, 2.0), (9, 1.0)]
    runs.write_rows(folder / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in ("1", None, [2], 3)])
    path, (run,) = write_report(folder)
    assert run.series("loss") == [(3, 1.0)] and text_of(path)


def test_of_two_runs_the_differences_come_first(tmp_path) -> None:
    first, second = runs.write_run(tmp_path / "a" / "run"), runs.write_run(tmp_path / "b" / "run", rate=2e-4)
    path, _ = write_report(first, second)
    assert path == first / "compared.html"
    page = path.read_text()
    assert "1 of 4 differ" in page
    rows = re.findall(r"<th scope=\"row\"( class=\"differs\")?><code><bdi>(\w+)</bdi>", page)
    assert [name for _, name in rows][:4] == ["learning_rate", "base_model", "optimizer", "seed"]
    assert [bool(mark) for mark, _ in rows][:4] == [True, False, False, False]
    assert str(first) in page and str(second) in page  # two runs of one name are told apart


def test_a_run_with_a_torn_checkpoint_says_so(tmp_path) -> None:
    folder = runs.write_run(tmp_path / "run")
    (folder / "checkpoint-20" / "adapter_model.safetensors").write_bytes(b"short")
    text = text_of(write_report(folder)[0])
    assert text.count("not complete; cannot be resumed from") == 1


def test_many_steps_stay_a_small_file_and_a_spike_stays_to_be_seen(tmp_path) -> None:
    folder = runs.write_run(tmp_path / "run", steps=30_000)
    path, _ = write_report(folder)
    assert path.stat().st_size < 600_000
    points = [(float(step), 50.0 if step == 12_345 else 1.0 + step % 7 / 10) for step in range(30_000)]
    kept = thinned(points)
    assert len(kept) <= 1200 and (12_345.0, 50.0) in kept and kept == sorted(kept)
    assert "29,800 more steps are in metrics.jsonl" in text_of(path)


def test_experts_are_listed_and_not_drawn(tmp_path) -> None:
    """Hundreds of projections a layer would be a picture of nothing."""
    folder = runs.write_run(tmp_path / "run")
    names = [f"model.layers.0.mlp.experts.{index}.up_proj" for index in range(40)]
    (folder / "base.json").write_text(json.dumps({"errors": dict.fromkeys([*names, "lm_head"], 0.1)}))
    text = text_of(write_report(folder)[0])
    assert all(name in text for name in [*names, "lm_head"])


def test_a_merged_folder_without_a_record_is_refused(tmp_path) -> None:
    folder = runs.write_run(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="give the folder that `halfbyte merge` wrote"):
        write_report(folder, merged=[tmp_path])
    with pytest.raises(ValueError, match="at most one for each"):
        write_report(folder, merged=[tmp_path, tmp_path])


def test_it_watches_until_the_run_ends(tmp_path) -> None:
    """The page reloads itself while the run goes on, and is written only when something has changed."""
    folder = runs.write_run(tmp_path / "run", steps=3, finished=False)
    metrics, written, slept = folder / "metrics.jsonl", [], []

    def write():
        path, found = write_report(folder, reload_s=7)
        written.append(path.read_text())
        return path, found

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        lines = {2: {"step": 4, "loss": 1.5}, 4: {"step": 4, "train_runtime": 1.0}}
        if len(slept) in lines:
            with metrics.open("a") as file:
                file.write(json.dumps(lines[len(slept)]) + "\n")

    watch(write, 7.0, sleep=sleep)
    assert slept == [7.0] * 4
    assert len(written) == 4  # at the start, when first looked at, and after each of the two changes
    assert all('http-equiv="refresh" content="7"' in page for page in written[:-1])
    assert "refresh" not in written[-1] and ", finished" in written[-1]
    assert not list(folder.glob(".*partial"))


def test_the_command_writes_it_and_says_where(tmp_path, capsys) -> None:
    folder = runs.write_run(tmp_path / "run")
    merged = runs.write_merged(tmp_path / "merged")
    with pytest.raises(SystemExit) as leaving:
        main(["report", str(folder), "--merged", str(merged), "--out", str(tmp_path / "x.html")])
    assert not leaving.value.code
    assert capsys.readouterr().out == f"report: {tmp_path / 'x.html'}\n"
    assert "97.0%" in text_of(tmp_path / "x.html")
    with pytest.raises(SystemExit) as leaving:
        main(["report", str(tmp_path / "none")])
    assert leaving.value.code == 2 and "no such folder" in capsys.readouterr().err
