"""The house's docstrings for mkdocstrings: names and meanings in two columns become definition lists.

    raises   ValueError when K is not divisible by 16.
             A second line goes on here.

Markdown would run such lines into one paragraph.
"""

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"(\S(?:.{0,40}?\S)?)\s{2,}(\S.*)")


class Columns(griffe.Extension):
    """Rewrites every docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Paragraph by paragraph; indented ones are code, which Markdown knows."""
    return "\n\n".join(definitions(part) for part in re.split(r"\n\s*\n", docstring.strip("\n")))


def definitions(paragraph: str) -> str:
    """The paragraph's lines of two columns as terms and meanings; what comes before them stays text."""
    lines = paragraph.split("\n")
    first = next((i for i, line in enumerate(lines) if COLUMNS.fullmatch(line)), None)
    if first is None or lines[0].startswith("    "):
        return paragraph
    out = [*lines[:first], ""] if first else []
    for line in lines[first:]:
        found = COLUMNS.fullmatch(line)
        if found:
            out += ["", f"`{found[1]}`", f":   {found[2]}"]
        elif line.startswith("  "):
            out.append(f"    {line.strip()}")
        else:
            out += ["", line]
    return "\n".join(out)
