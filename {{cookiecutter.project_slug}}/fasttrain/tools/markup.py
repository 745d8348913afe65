"""HTML in which all text is escaped, by construction: what isn't `Markup` is text, whatever it holds."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from fasttrain.sinks import escaped

VOID = frozenset(("link", "meta"))  # elements without content


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element.

    Args:
        name: of the element, from this program, never from data.
        children: `Markup` as it is, None left out, everything else as escaped text.
        attributes: ``class_`` is class, ``aria_label`` is aria-label; None or False leaves one out, True has no value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            attribute = key.rstrip("_").replace("_", "-")
            parts.append(attribute if value is True else f'{attribute}="{text(value)}"')
    opening = f"<{' '.join(parts)}>"
    return Markup(opening if name in VOID else f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
    """Children one after another."""
    return Markup("".join(each if isinstance(each, Markup) else text(each) for each in children if each is not None))


def text(value: Any) -> Markup:
    """Escaped, also for use between double quotes; control characters are written out."""
    return Markup(html.escape(escaped(str(value)), quote=True))


def data(value: Any, **attributes: Any) -> Markup:
    """Values for the page's script, as a block of JSON that can't end early and isn't executed."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Markup(body), type="application/json", **attributes)
