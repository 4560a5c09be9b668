"""HTML from nested calls, in which text cannot become markup by accident.

Everything that is not already `Markup` is escaped, in children and in attributes: names, prompts and answers come from
files that anybody may have written. A template engine does this too, but its escaping hangs on a switch.
"""

import re
from collections.abc import Iterable
from html import escape

VOID = {"meta", "link", "br", "img"}
# What no HTML file may hold, and lone surrogates, which no UTF-8 file can.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")


class Markup(str):
    """Text that is HTML already."""


Child = str | float | None | Iterable["Child"]


def text(value: object) -> Markup:
    """Any value as escaped text."""
    return value if isinstance(value, Markup) else Markup(escape(FORBIDDEN.sub("\ufffd", str(value))))


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """`tag("td", "a < b", class_="number")`; an underscore in an attribute is a hyphen, a last one is dropped.

    An attribute that is None or False is left out, True stands alone.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Children one after another; None is nothing."""
    parts = []
    for child in children:
        if child is None:
            continue
        parts.append(text(child) if isinstance(child, str | int | float) else join(child))
    return Markup("".join(parts))


def foreign(value: object) -> Markup:
    """Text of unknown script and direction, kept from turning its surroundings around."""
    return tag("bdi", str(value))


def number(value: float, spec: str = ",.4g") -> Markup:
    """A figure, rounded for the eye, with its exact value for whoever reads the file."""
    return tag("data", format(value, spec), value=repr(value))


def slug(title: str) -> str:
    """A title as an id."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
