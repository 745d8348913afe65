"""Charts as SVG that a page shows without a script, drawn by Vega-Lite, and what they show in words and numbers.

Vega-Lite gets numbers only: names are the page's to write. Colours are custom properties of report.css, so that one
drawing serves light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fasttrain.errors import UserError
from fasttrain.tools.markup import Markup, data, join, tag
from fasttrain.tools.report_data import Floats, Line
from fasttrain.tools.report_parts import swatch

LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24  # pixels around the plot
WIDE, NARROW = 1180, 384  # pixels of a whole chart; 384 fits a phone, and three of them a desktop
ROWS = 9  # of the table of numbers


@dataclass(frozen=True)
class Chart:
    """One chart over time.

    Attributes:
        unit: of its values, for the title.
        stack: lines lie on one another, as areas; they have the same times then.
        zero: the axis begins at 0.
        top: where it ends, None: at the largest value.
        rules: times of dashed lines, and `rule` what they are.
    """

    key: str  # names it in the page, unlike all others
    title: str
    unit: str
    lines: Sequence[Line]
    stack: bool = False
    zero: bool = True
    top: float | None = None
    rules: Sequence[float] = field(default_factory=tuple)
    rule: str = ""
    wide: bool = False
    height: int = 150

    @property
    def empty(self) -> bool:
        return not any(len(line.x) for line in self.lines)


@dataclass(frozen=True)
class Span:
    """The time axis that all charts of a page share."""

    end: float  # seconds

    @property
    def unit(self) -> tuple[str, float]:
        if self.end < 180:
            return "s", 1.0
        return ("min", 60.0) if self.end < 3 * 3600 else ("h", 3600.0)

    def say(self, seconds: float) -> str:
        name, scale = self.unit
        return f"{seconds / scale:.{1 if self.end / scale < 100 else 0}f} {name}"


def figure(chart: Chart, span: Span) -> Markup:
    """The chart with its title, legend, text alternative and table of numbers."""
    heading = tag("h3", chart.title, tag("span", f" {chart.unit}", class_="unit") if chart.unit else None)
    caption = tag("figcaption", heading, _legend(chart))
    if chart.empty:
        return tag("figure", caption, tag("p", "nothing recorded", class_="none"), class_="chart", id=chart.key)
    sizes = [("wide", WIDE, chart.height + 60), ("narrow", NARROW, chart.height)] if chart.wide else []
    drawn = [
        tag("div", _labelled(svg(chart, span, width, height), _words(chart, span)), class_=f"plot {size}")
        for size, width, height in sizes or [("", NARROW, chart.height)]
    ]
    stage = tag(
        "div", *drawn, class_="stage", tabindex="0", role="group", aria_label=f"{chart.title}: arrow keys read values"
    )
    table = tag("details", tag("summary", "Numbers"), _table(chart, span), id=f"{chart.key}-numbers")
    values = data(_values(chart, span), class_="values")
    return tag("figure", caption, stage, table, values, class_="chart full" if chart.wide else "chart", id=chart.key)


def svg(chart: Chart, span: Span, width: int, height: int) -> str:
    """Drawn by Vega-Lite.

    Raises:
        UserError: the package that draws is not installed.
    """
    try:
        import vl_convert  # 0.7 s at the first chart, and not needed for anything else
    except ImportError:
        raise UserError("report: the package that draws is missing: pip install vl-convert-python") from None
    drawn: str = vl_convert.vegalite_to_svg(_specification(chart, span, width, height), allowed_base_urls=[])
    return drawn


def _specification(chart: Chart, span: Span, width: int, height: int) -> dict[str, Any]:
    name, scale = span.unit
    grid = {"gridColor": "var(--grid)", "domain": False, "ticks": False, "labelColor": "var(--muted)", "title": None}
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"domain": [0, max(span.end / scale, 1e-6)], "nice": False},
        "axis": {**grid, "grid": False, "tickCount": width // 90, "labelExpr": f"datum.label + ' {name}'"},
    }
    bounds = {"zero": chart.zero or _flat(chart), **({} if chart.top is None else {"domain": [0, chart.top]})}
    form = {} if _largest(chart) < 1e4 else {"format": "~s"}
    y = {
        "field": "y",
        "type": "quantitative",
        "scale": {**bounds, "nice": chart.top is None},
        "axis": {**grid, "tickCount": 4, **form},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": width - LEFT - RIGHT,
        "height": height - TOP - BOTTOM,
        "autosize": {"type": "none"},
        "padding": {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "background": None,
        "layer": [*_layers(chart, x, y, scale), *_rules(chart, x, scale)],
        "config": {
            "aria": False,
            "font": "inherit",
            "view": {"stroke": None},
            "axis": {"labelFontSize": 11, "labelPadding": 5},
        },
    }


def _layers(chart: Chart, x: dict[str, Any], y: dict[str, Any], scale: float) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = []
    bottom: Floats | float = 0.0
    for line in chart.lines:
        colour = f"var(--{line.colour})"
        if chart.stack:
            values = _rows(line.x / scale, bottom + line.y, np.zeros_like(line.y) + bottom)
            bottom = bottom + line.y
            mark = {"type": "area", "color": colour, "opacity": 0.9}
            layers.append(_layer(values, mark, {"x": x, "y": y, "y2": {"field": "h"}}))
            continue
        if line.low is not None and line.high is not None:
            values = _rows(line.x / scale, line.low, line.high)
            mark = {"type": "area", "color": colour, "opacity": 0.18}
            layers.append(_layer(values, mark, {"x": x, "y": y, "y2": {"field": "h"}}))
        values = _rows(line.x / scale, line.y)
        mark = {"type": "line", "color": colour, "strokeWidth": 1.5, "strokeJoin": "round"}
        if line.dots or len(line.x) == 1:
            mark["point"] = {"color": colour, "size": 22}
        layers.append(_layer(values, mark, {"x": x, "y": y}))
    return layers


def _layer(values: list[dict[str, Any]], mark: dict[str, Any], encoding: dict[str, Any]) -> dict[str, Any]:
    clip = "point" not in mark  # half a dot at the edge would be missing
    return {"data": {"values": values}, "mark": {**mark, "clip": clip}, "encoding": encoding}


def _rules(chart: Chart, x: dict[str, Any], scale: float) -> list[dict[str, Any]]:
    if not chart.rules:
        return []
    mark = {"type": "rule", "color": "var(--muted)", "strokeDash": [2, 3], "strokeWidth": 1, "opacity": 0.6}
    return [_layer([{"x": each / scale} for each in chart.rules], mark, {"x": x})]


def _rows(x: Floats, y: Floats, h: Floats | None = None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"x": _short(a), "y": _short(b)} for a, b in zip(x, y, strict=True)]
    if h is not None:
        for row, value in zip(rows, h, strict=True):
            row["h"] = _short(value)
    return rows


def _short(value: float) -> float | None:
    """Enough digits to draw and to read."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _flat(chart: Chart) -> bool:
    """All values are one and the same: an axis around it would have nothing to show."""
    return len({float(value) for line in chart.lines for value in line.y if np.isfinite(value)}) < 2


def _largest(chart: Chart) -> float:
    return max((float(np.nanmax(np.abs(line.y))) for line in chart.lines if len(line.y)), default=0.0)


def _legend(chart: Chart) -> Markup:
    """Names, each with its last value, in whose place report.js puts the one under the cursor."""
    items = [
        tag("li", swatch(line.colour), tag("span", line.name), " ", tag("span", _at(line, np.inf), class_="value"))
        for line in chart.lines
    ]
    if chart.rules:
        items.append(tag("li", tag("span", class_="dashes"), tag("span", chart.rule)))
    return tag("ul", *items, class_="legend")


def _labelled(drawn: str, words: str) -> Markup:
    """The drawing as one image for a screen reader, with its text alternative, and free to take any width."""
    start = drawn.index("viewBox=")
    end = drawn.index('"', start + 9) + 1
    body = drawn[drawn.index(">") + 1 :]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {drawn[start:end]} role="img" aria-label="{join([words])}">'
    return Markup(head + body)


def _words(chart: Chart, span: Span) -> str:
    """The chart in a sentence or two."""
    parts = []
    for line in chart.lines:
        known = np.isfinite(line.y)
        if not known.any():
            continue
        x, y = line.x[known], line.y[known]
        least, most = int(np.argmin(y)), int(np.argmax(y))
        parts.append(
            f"{line.name} from {y[0]:.4g} to {y[-1]:.4g}, lowest {y[least]:.4g} at {span.say(x[least])}, "
            f"highest {y[most]:.4g} at {span.say(x[most])}"
        )
    unit = f" in {chart.unit}" if chart.unit else ""
    return f"{chart.title}{unit}, over {span.say(span.end)}. " + "; ".join(parts)


def _table(chart: Chart, span: Span) -> Markup:
    """A few values of each line at the same moments."""
    moments = np.linspace(min(float(line.x[0]) for line in chart.lines if len(line.x)), span.end, ROWS)
    head = tag("tr", tag("th", "time", scope="col"), *(tag("th", line.name, scope="col") for line in chart.lines))
    rows = [
        tag("tr", tag("th", span.say(moment), scope="row"), *(tag("td", _at(line, moment)) for line in chart.lines))
        for moment in moments
    ]
    return tag(
        "div",
        tag("table", tag("thead", head), tag("tbody", *rows)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label="Numbers",
    )


def _at(line: Line, moment: float) -> str:
    if not len(line.x):
        return ""
    value = line.y[-1] if moment == np.inf else line.y[int(np.argmin(np.abs(line.x - moment)))]
    return f"{value:.4g}" if np.isfinite(value) else "n/a"


def _values(chart: Chart, span: Span) -> dict[str, Any]:
    """What report.js needs to read values under the cursor."""
    name, scale = span.unit
    lines = [{"x": [_short(x / scale) for x in line.x], "y": [_short(y) for y in line.y]} for line in chart.lines]
    return {"end": span.end / scale, "unit": name, "left": LEFT, "right": RIGHT, "lines": lines}
