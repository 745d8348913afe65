"""The report as one page: its frame around the sections, style and script in it, and nothing fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fasttrain.tools import report_curves as curves
from fasttrain.tools import report_sections as sections
from fasttrain.tools.markup import Markup, tag
from fasttrain.tools.report_charts import Span
from fasttrain.tools.report_data import RunData, number

HERE = Path(__file__).parent
ICON = (
    "data:image/svg+xml,"
    + "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    + ("%3Cpath d='M0 8V5l3-3 2 2 3-4v8z' fill='%232f9e5b'/%3E%3C/svg%3E")
)


def page(runs: Sequence[RunData], live: float | None = None) -> str:
    """The page.

    Args:
        runs: at least one.
        live: seconds after which it asks for its next version; None for a page that stays as it is.
    """
    style, script = (HERE / "report.css").read_text("utf-8"), (HERE / "report.js").read_text("utf-8")
    span = Span(max([run.seconds for run in runs] + [1e-3]))
    title = " and ".join(run.name for run in runs[:3]) + (" and others" if len(runs) > 3 else "")
    body = [
        sections.verdict(runs),
        sections.tiles(runs[0]) if len(runs) == 1 else sections.side_by_side(runs),
        curves.time(runs, span),
        curves.learning(runs, span),
        curves.machine(runs, span),
        sections.compared(runs),
        sections.settings(runs),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href=ICON),
        tag("title", f"{title}: training report"),
        tag("style", Markup(style)),
    )
    shown = tag(
        "body",
        tag("a", "To the verdict", href="#verdict", class_="skip"),
        _header(runs, title, live),
        _navigation(runs, body[5] is not None),
        tag("main", *body, id="main"),
        tag("p", role="status", id="spoken", class_="unseen"),
        tag("script", Markup(script)),
        data_live=None if live is None else f"{live:g}",
    )
    return f"<!doctype html>\n{tag('html', head, shown, lang='en')}\n"


def policy(style: str, script: str) -> str:
    """What the browser may do with the page: run this script, use this style, ask for the page itself again."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _header(runs: Sequence[RunData], title: str, live: float | None) -> Markup:
    facts = runs[0].history.facts
    began = number(facts.get("started"))
    parts = [str(facts["device"])] if "device" in facts else []
    parts.append("1 process" if runs[0].world == 1 else f"{runs[0].world} processes")
    if 0 < began < 4e9:
        parts.append("began " + datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M"))
    words = tag("p", " · ".join(parts), class_="facts") if len(runs) == 1 else None
    state = "live, " if live is not None else ""
    stamp = tag("p", f"{state}as of {time.strftime('%Y-%m-%d %H:%M:%S')}", class_="stamp", id="stamp")
    return tag(
        "header", tag("div", tag("p", "Training report", class_="over"), tag("h1", title), words), stamp, class_="top"
    )


def _navigation(runs: Sequence[RunData], with_ranks: bool) -> Markup:
    links = [("verdict", "Verdict"), ("time", "Time"), ("learning", "Learning"), ("machine", "Machine")]
    links += [("ranks", "Ranks")] if with_ranks else []
    links += [("settings", "Settings")]
    if len(runs) > 1:
        links.insert(1, ("runs", "Runs"))
    items = [tag("li", tag("a", name, href=f"#{key}")) for key, name in links]
    return tag("nav", tag("ul", *items), aria_label="Sections")
