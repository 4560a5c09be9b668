"""The page in a real browser: it renders and is silent, its numbers are the metrics file's, and it can be read by all.

Skipped where no Chromium is installed (Debian: apt-get install chromium).
"""

import json
from pathlib import Path

import pytest

from halfbyte.report import write_report
from tests.report import runs
from tests.report.browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")

# The exact values in the table under a chart: [step, value or null, ...] a row.
TABLE = """(title => {
  const figure = [...document.querySelectorAll('figure')].find(f => f.querySelector('h3').textContent === title);
  return [...figure.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell =>
    cell.tagName === 'TH' ? Number(cell.textContent)
      : cell.firstElementChild ? Number(cell.firstElementChild.value) : null));
})"""
# The lowest contrast between a text and what lies behind it, by the formula of WCAG 2, with the text.
CONTRAST = """(() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.matches('.skip, style')) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const [a, b] = [light(parse(svg ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < worst[0]) worst = [(a + .05) / (b + .05), e.textContent];
  }
  return worst;
})()"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs, merged; a report of the first, and one of both."""
    made = tmp_path_factory.mktemp("report")
    first, second = runs.write_run(made / "first", steps=60), runs.write_run(made / "second", rate=5e-4)
    merged = [runs.write_merged(made / "merged-1"), runs.write_merged(made / "merged-2", low=0.2)]
    write_report(first, merged=merged[:1], out=made / "one.html")
    write_report(first, second, merged=merged, out=made / "two.html")
    return made


@pytest.mark.parametrize("page", ["one.html", "two.html"])
def test_it_renders_in_silence_and_fetches_nothing(page, browser, folder) -> None:
    browser.open(folder / page)
    assert browser.complaints() == []
    assert browser.requests() == [(folder / page).as_uri()]
    assert browser.evaluate("document.scripts.length") == 0
    drawn = browser.evaluate("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height > 100)")
    assert drawn == [True] * 6
    headings = browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert headings == [
        "Training",
        "Sample answers",
        "Kept by the merge",
        "Quantization error",
        "Checkpoints",
        "Configuration",
        "Versions",
    ]


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("Loss", ["loss", "eval_loss"]),
        ("Learning rate", ["learning_rate"]),
        ("Gradient norm", ["grad_norm"]),
        ("Speed", ["tokens_per_second"]),
        ("Peak memory", ["memory_gb"]),
    ],
)
def test_the_numbers_are_those_of_the_metrics_file(title, keys, browser, folder) -> None:
    """Every step, every digit; also of two runs side by side."""
    rows = [[json.loads(line) for line in (folder / name / "metrics.jsonl").open()] for name in ("first", "second")]
    for page, shown in (("one.html", rows[:1]), ("two.html", rows)):
        columns = [{row["step"]: row[key] for row in run if key in row} for key in keys for run in shown]
        steps = sorted(set().union(*columns))
        browser.open(folder / page)
        found = browser.evaluate(f"{TABLE}({json.dumps(title)})")
        assert found == [[step, *(column.get(step) for column in columns)] for step in steps]


def test_heat_maps_are_the_records(browser, folder) -> None:
    """Each layer's number in its row and column; the colour follows it."""
    browser.open(folder / "one.html")
    cells = """[...document.querySelectorAll('table.heat')].map(table => Object.fromEntries(
      [...table.querySelectorAll('tbody tr')].flatMap(row => [...row.querySelectorAll('td')].map((cell, i) =>
        ['model.layers.' + row.firstChild.textContent + '.' + table.querySelectorAll('thead abbr')[i].title,
         Number(cell.firstChild.value)]))))"""
    kept, errors = browser.evaluate(cells)
    assert kept == runs.layer_values(6, 0.93, 1.01) and errors == runs.layer_values(6, 0.088, 0.104)
    columns = browser.evaluate(
        "[...document.querySelector('table.heat').querySelectorAll('abbr')].map(a => a.textContent)"
    )
    assert columns == ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.mark.parametrize("page", ["one.html", "two.html"])
@pytest.mark.parametrize("width", [320, 390, 800, 1100, 1400])
def test_nothing_is_wider_than_the_screen(page, width, browser, folder) -> None:
    """Wide tables scroll inside their own frames."""
    browser.open(folder / page, width=width, height=800)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    widths = browser.evaluate(
        "[...document.querySelectorAll('.tiles div, figure')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert max(widths) <= 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("media", ["screen", "print"])
def test_every_text_stands_out(dark, media, browser, folder) -> None:
    """WCAG's 4.5:1 for all texts, in charts and cells too; paper stays white in dark mode."""
    browser.open(folder / "two.html", dark=dark, media=media)
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    worst, text = browser.evaluate(CONTRAST)
    assert worst >= 4.5, text
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (media == "print" or not dark)


def test_a_screen_reader_is_told_everything(browser, folder) -> None:
    """In the accessibility tree: pictures have names, charts descriptions too, tables and regions names; one h1."""
    browser.open(folder / "two.html")
    nodes = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]

    def of(role: str) -> list[tuple[str, str]]:
        found = (node for node in nodes if node["role"]["value"] == role)
        return [(node["name"]["value"], node.get("description", {}).get("value", "")) for node in found]

    pictures = of("image")
    assert {"Loss", "Learning rate", "Gradient norm", "Speed", "Peak memory", "Memory by kind"} <= dict(pictures).keys()
    assert "held out, B: 4.312 at step 0, 2.557 at step 40" in dict(pictures)["Loss"]
    for role in ("image", "region", "table", "link", "navigation"):
        assert of(role) and all(name for name, _ in of(role)), (role, of(role))
    assert len(browser.evaluate("[...document.querySelectorAll('h1')].length ? ['one'] : []")) == 1
    assert browser.evaluate("document.documentElement.lang") == "en"
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_a_keyboard_reaches_and_opens_the_numbers(browser, folder) -> None:
    browser.open(folder / "one.html")

    def press(key: str, code: int) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    press("Tab", 9)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    for _ in range(40):
        press("Tab", 9)
        if browser.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    press("Enter", 13)
    assert browser.evaluate("document.activeElement.parentElement.open")
    press("Tab", 9)
    assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == "Loss: numbers"


def test_it_prints(browser, folder, tmp_path) -> None:
    browser.open(folder / "one.html")
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_hostile_content_stays_text(browser, tmp_path) -> None:
    """Markup, quotes, math, a right-to-left override and a NUL in everything that a run's files can say."""
    folder, evil = tmp_path / "<b>run<b>", runs.HOSTILE
    runs.write_run(folder)
    (folder / "config.yaml").write_text(json.dumps({"base_model": evil, evil: [evil]}))
    (folder / "versions.json").write_text(json.dumps({evil: evil}))
    (folder / "base.json").write_text(json.dumps({"errors": {evil: 0.1, f"model.layers.0.{evil}": 0.2}}))
    runs.write_rows(folder / "samples.jsonl", [{"step": 0, "prompt": evil, "answer": evil}])
    (folder / "checkpoint-7").mkdir()
    path, _ = write_report(folder)
    browser.open(path)
    assert browser.complaints() == [] and len(browser.requests()) == 1
    assert browser.evaluate("document.scripts.length + document.images.length") == 0
    assert browser.evaluate("document.title") == "<b>run<b>: halfbyte"
    shown = evil.replace("\x00", "\ufffd")
    assert browser.evaluate("document.querySelector('table.stack td').textContent") == shown
    assert (
        browser.evaluate(
            f"[...document.querySelectorAll('bdi')].filter(e => e.textContent === {json.dumps(shown)}).length"
        )
        >= 6
    )
