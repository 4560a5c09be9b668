"""The page around the sections: head, title, navigation.

It forbids itself to load or run anything (Content-Security-Policy), so a hostile run's folder has no way out of it.
"""

from halfbyte import __version__
from halfbyte.report import sections
from halfbyte.report.html import Child, Markup, foreign, slug, tag
from halfbyte.report.read import Run
from halfbyte.report.style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(runs: list[Run], *, reload_s: int | None = None) -> str:
    """The report of one run, or of two laid over each other.

    reload_s  the browser loads the file anew after so many seconds, for a run that goes on.
    """
    bodies = {title: section(runs) for title, section in sections.SECTIONS.items()}
    bodies = {title: body for title, body in bodies.items() if body is not None}
    title = " and ".join(run.name for run in runs)
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="refresh", content=reload_s) if reload_s else None,
        tag("title", f"{title}: halfbyte"),
        tag("style", Markup(STYLE)),
    ]
    links = [tag("li", tag("a", name, href=f"#{slug(name)}")) for name in bodies]
    body = [
        tag("a", "Skip to the charts", href="#main", class_="skip"),
        tag(
            "header",
            tag("h1", tag("bdi", title)),
            [tag("p", lead(run), class_="lead") for run in runs],
            legend(runs),
            tag("p", f"The run goes on; this page loads anew every {reload_s} s.", role="status") if reload_s else None,
            [tag("p", foreign(note), class_="note") for run in runs for note in run.notes],
            sections.glance(runs),
            tag("nav", tag("ul", links), aria_label="Sections") if links else None,
        ),
        tag("main", [section(name, content) for name, content in bodies.items()] or nothing(), id="main"),
        tag("footer", f"halfbyte {__version__}. One file, nothing loaded from elsewhere; the data are the run's own."),
    ]
    page = tag("html", tag("head", head), tag("body", body, class_="two" if len(runs) > 1 else None), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(name: str, content: Child) -> Markup:
    name_id = slug(name)
    return tag("section", tag("h2", name, id=name_id), content, aria_labelledby=name_id)


def nothing() -> Markup:
    return tag("p", "Nothing has been recorded yet.")


def lead(run: Run) -> list[Child]:
    """Where it lies, what it trains, and whether it goes on."""
    state = "finished" if run.finished else "no end recorded: it goes on, or was stopped"
    base = run.config.get("base_model")
    return [tag("code", foreign(run.folder)), ", ", [foreign(base), ", "] if base else None, state]


def legend(runs: list[Run]) -> Markup | None:
    """Which colour is which run."""
    if len(runs) == 1:
        return None
    items = [
        tag("li", tag("span", class_=f"key {letter}"), f"{letter.upper()}: ", foreign(run.name))
        for letter, run in zip(sections.KEYS, runs, strict=True)
    ]
    return tag("ul", items, class_="legend")
