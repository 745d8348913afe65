"""What the sections of the report are made of: headings, tables, bars, folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttrain.tools.markup import Markup, tag

LONGEST = 400  # characters of a setting's value


def section(key: str, title: str, *children: Any) -> Markup:
    return tag("section", tag("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def fold(key: str, title: str, body: Markup) -> Markup:
    return tag("details", tag("summary", title), body, id=key, class_="fold")


def table(heads: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str | None = None) -> Markup:
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    table = tag("table", tag("thead", top), tag("tbody", *body), class_=class_)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Table")


def bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """Parts of one, side by side. Decoration: the numbers stand beside it."""
    drawn, left = [], 0.0
    for colour, part in parts:
        width = max(0.0, min(part, 1.0 - left)) if part == part else 0.0
        drawn.append(tag("rect", x=f"{left:.2%}", y="0", width=f"{width:.2%}", height="100%", class_=f"fill-{colour}"))
        left += width
    return tag("svg", *drawn, class_="bar", aria_hidden="true")


def swatch(colour: str) -> Markup:
    return tag("span", class_=f"swatch bg-{colour}", aria_hidden="true")


def sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def setting(value: Any) -> str:
    """A setting as YAML would have it, cut off where it is very long."""
    words = {None: "null", True: "true", False: "false"}
    found = words[value] if value is None or isinstance(value, bool) else str(value)
    return found if len(found) <= LONGEST else f"{found[:LONGEST]} ..."
