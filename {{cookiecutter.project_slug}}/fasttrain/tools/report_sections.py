"""The sections of the report's page, each from the runs that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fasttrain.dashboard import duration
from fasttrain.judge import Finding
from fasttrain.records import PHASES
from fasttrain.tools.markup import Markup, tag
from fasttrain.tools.report_charts import Chart, Span, figure
from fasttrain.tools.report_data import (
    Floats,
    Line,
    RunData,
    gauge,
    number,
    shares,
    stacked,
    thinned,
    throughput,
    validations,
)

SMALL = 160  # points of a line in a small chart
MOST_RANKS = 64  # in the table of ranks; of more, the slowest
LOG_BYTES, LOG_LINES = 1 << 20, 40  # of the log's end that is searched, and lines shown
LONGEST = 400  # characters of a setting's value


def verdict(runs: Sequence[RunData]) -> Markup:
    """What holds each run back, and the exact change."""
    parts = []
    for run in runs:
        found = run.verdict
        state = "unsure" if not found.enough else "held" if found.findings else "fine"
        title = tag("p", tag("span", class_=f"dot {state}", aria_hidden="true"), found.says, class_=f"says {state}")
        name = tag("h3", run.name, class_="run-name") if len(runs) > 1 else None
        cards = [_card(finding) for finding in found.findings]
        parts.append(tag("div", name, title, tag("div", *cards, class_="cards") if cards else None, class_="verdict"))
    return _section("verdict", "Verdict", *parts)


def _card(finding: Finding) -> Markup:
    where = f" on rank {finding.rank}" if finding.rank is not None else ""
    share = max(0.0, min(1.0, number(finding.share) if finding.share == finding.share else 0.0))
    cost = tag("p", tag("strong", f"{share:.0%}"), " of the time", class_="cost") if share > 0 else None
    return tag(
        "article",
        tag("header", tag("h4", finding.cause, where), cost),
        _bar([("wait", share)]) if share > 0 else None,
        tag("p", finding.says),
        tag("p", finding.evidence, class_="evidence"),
        tag("p", tag("span", "Change", class_="label"), tag("code", finding.remedy), class_="remedy"),
        tag("p", f"{number(finding.sure):.0%} sure", class_="sure"),
        class_="card",
    )


def numbers_of(run: RunData) -> dict[str, str]:
    """The figures that sum a run up, by their names, as text."""
    columns, parts = run.columns, shares(run.columns)
    wall = columns["wall"][np.isfinite(columns["wall"])]
    found = {"ran for": duration(run.seconds), "batches": f"{len(run.history.ranks[0].records):,}"}
    if len(wall) and wall.sum() > 0:
        found["images/s"] = f"{np.nansum(columns['images']) * run.world / wall.sum():,.0f}"
        found["ms a batch"] = f"{np.median(wall) * 1e3:,.1f}"
    if parts:
        found["waiting for data"] = f"{parts['wait'][0]:.1%}"
    if run.verdict.busy is not None:
        found["device busy"] = f"{run.verdict.busy:.1%}"
    for name, (_, values) in validations(run).items():
        known = values[np.isfinite(values)]
        if len(known):
            best = known.min() if "loss" in name or "error" in name else known.max()
            found[f"best {name}"] = f"{best:.4g}"
    return found


def tiles(run: RunData) -> Markup:
    """One run's figures, large."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in numbers_of(run).items()]
    return tag("dl", *items, class_="tiles")


def side_by_side(runs: Sequence[RunData]) -> Markup:
    """The figures of several runs, and the settings in which they differ."""
    rows = [numbers_of(run) for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [[name, *(row.get(name, "n/a") for row in rows)] for name in names]
    different = differences(runs)
    heads = [tag("span", _swatch(f"run{i}"), run.name) for i, run in enumerate(runs)]
    return _section(
        "runs",
        "Runs side by side",
        _table(["", *heads], body),
        tag("h3", "Settings that differ"),
        _table(["", *heads], different) if different else tag("p", "None.", class_="none"),
    )


def time(runs: Sequence[RunData], span: Span) -> Markup:
    """Where the time of a batch goes, and how many images a second that makes."""
    parts: list[Markup] = []
    for i, run in enumerate(runs):
        x, means = stacked(run.columns)
        lines = [Line(phase, phase, x, means[phase]) for phase in PHASES if len(x) and means[phase].max() > 0]
        title = "Time of a batch" if len(runs) == 1 else f"Time of a batch: {run.name}"
        pauses = [event for event in run.events("pause") if event.get("name") == "validation"][:200]
        rules = [float(t) for t in run.timeline(_times(pauses)) if np.isfinite(t)]
        chart = Chart(f"phases-{i}", title, "ms", lines, True, rules=rules, rule="validation", wide=True)
        parts += [_phases(run) if len(runs) == 1 else Markup(""), figure(chart, span)]
    speed = [Line(n, c, *throughput(run.columns, run.world, SMALL)) for n, c, run in _named(runs, "images/s")]
    waits = [_thin(n, c, run, "wait", 1e3) for n, c, run in _named(runs, "wait")]
    ready = [_thin(n, c, run, "ready") for n, c, run in _named(runs, "ready")]
    charts = [
        Chart("speed", "Throughput", "images/s", speed),
        Chart("waits", "Wait for a batch", "ms, mean and range", waits),
        Chart("ready", "Batches ready in the loader", "", ready),
    ]
    return _section("time", "Where the time goes", *parts, _grid(charts, span))


def _phases(run: RunData) -> Markup:
    """Each phase's share and median: the same as the panel on a terminal."""
    parts = shares(run.columns)
    if not parts:
        return tag("p", "No batches yet.", class_="none")
    rows = [
        [tag("span", _swatch(phase), phase), _bar([(phase, share)]), f"{share:.1%}", f"{middle:,.2f}"]
        for phase, (share, middle) in parts.items()
    ]
    return tag("div", _table(["phase", "", "share", "median ms"], rows), class_="phases")


def learning(runs: Sequence[RunData], span: Span) -> Markup:
    """Loss, metrics, learning rate."""
    found = [validations(run) for run in runs]
    loss = [_thin(n, c, run, "loss") for n, c, run in _named(runs, "training")]
    for i, each in enumerate(found):
        if "loss" in each:
            name = "validation" if len(runs) == 1 else f"{runs[i].name}, validation"
            loss.append(thinned(name, "accent2" if len(runs) == 1 else f"run{i}", *each["loss"], SMALL, True))
    charts = [Chart("loss", "Loss", "", loss, zero=False)]
    names = list(dict.fromkeys(name for each in found for name in each if name != "loss"))[:12]
    for at, metric in enumerate(names):
        named = _named(runs, metric)
        lines = [
            thinned(n, c, *found[i][metric], SMALL, True) for i, (n, c, _) in enumerate(named) if metric in found[i]
        ]
        charts.append(Chart(f"metric-{at}", metric, "validation", lines, zero=False))
    charts.append(
        Chart("lr", "Learning rate", "", [_thin(n, c, run, "lr") for n, c, run in _named(runs, "learning rate")])
    )
    return _section("learning", "Learning", _grid(charts, span))


GAUGES: tuple[tuple[str, str, str, tuple[tuple[str, str, float], ...], float | None], ...] = (
    ("gpu", "GPU utilisation", "%", (("gpu", "in use", 1.0),), 100.0),
    ("gpu-memory", "GPU memory", "GB", (("gpu_memory_used", "used", 1e-9), ("gpu_memory_total", "there", 1e-9)), None),
    ("gpu-heat", "GPU temperature", "°C", (("gpu_temperature", "temperature", 1.0),), None),
    ("gpu-power", "GPU power", "W", (("gpu_power", "power", 1.0),), None),
    ("cpu", "CPU", "% of the cores", (("cpu", "mean", 1.0), ("busiest", "busiest core", 1.0)), 100.0),
    ("memory", "Memory", "GB", (("memory_used", "machine", 1e-9), ("rss", "this process", 1e-9)), None),
    ("disk", "Disk", "MB/s", (("disk_read", "read", 1.0), ("disk_write", "write", 1.0)), None),
    ("disk-busy", "Disk busy", "%", (("disk_busy", "busy", 1.0),), 100.0),
    ("files", "Open files", "this process", (("open_files", "open files", 1.0),), None),
)


def machine(runs: Sequence[RunData], span: Span) -> Markup:
    """The gauges of rank 0's machine. One run shows all readings of a chart, several the first of each."""
    charts = []
    for key, title, unit, fields, top in GAUGES:
        lines = []
        for i, run in enumerate(runs):
            for place, (name, label, scale) in enumerate(fields[: None if len(runs) == 1 else 1]):
                x, y = busiest(run) if name == "busiest" else gauge(run, name)
                colour = ("run0", "accent2")[place] if len(runs) == 1 else f"run{i}"
                if np.isfinite(y).any():
                    lines.append(thinned(label if len(runs) == 1 else run.name, colour, x, y * scale, SMALL))
        if lines:
            first = f"{unit}, {fields[0][1]}" if len(runs) > 1 and len(fields) > 1 else unit
            charts.append(Chart(key, title, first, [_without_range(line) for line in lines], top=top))
    body = _grid(charts, span) if charts else tag("p", "No gauges were recorded.", class_="none")
    return _section("machine", "Machine", body)


def busiest(run: RunData) -> tuple[Floats, Floats]:
    """Times, and the load of the core that was busiest."""
    rows = [event for event in run.events("gauges") if isinstance(event.get("cores"), list) and event["cores"]]
    peaks = [float(np.nanmax([number(core) for core in event["cores"]] + [-1.0])) for event in rows]
    values = np.array(peaks)
    return run.timeline(_times(rows)), np.where(values < 0, np.nan, values)


def ranks(run: RunData, named: bool) -> Markup | None:
    """What the ranks spent a batch on, one row a rank; None for one rank."""
    if len(run.ranks) < 2:
        return None
    means = {
        rank: {phase: float(np.nanmean(each[phase])) * 1e3 for phase in PHASES}
        for rank, each in run.ranks
        if np.isfinite(each["wall"]).any()
    }
    if not means:
        return None
    # A rank that is slow waits least for the others; its own work is all but the backward pass, in which ranks meet.
    own = {rank: sum(value for phase, value in each.items() if phase != "backward") for rank, each in means.items()}
    shown = sorted(sorted(means, key=lambda rank: own[rank])[-MOST_RANKS:])
    most = max(sum(means[rank].values()) for rank in shown) or 1.0
    rows = [
        [
            f"rank {rank}",
            _bar([(phase, value / most) for phase, value in means[rank].items()]),
            *(f"{means[rank][phase]:,.1f}" for phase in PHASES),
            f"{sum(means[rank].values()):,.1f}",
        ]
        for rank in shown
    ]
    note = f"the slowest {MOST_RANKS} of {len(means)}; " if len(means) > MOST_RANKS else ""
    words = f"Mean milliseconds a batch; {note}ranks wait for one another in backward, where gradients are summed."
    heads = ["", "", *(tag("span", _swatch(phase), phase) for phase in PHASES), "batch"]
    title = tag("h3", run.name, class_="run-name") if named else None
    return tag("div", title, tag("p", words, class_="note"), _table(heads, rows, class_="ranks"))


def compared(runs: Sequence[RunData]) -> Markup | None:
    """The section of the ranks, if any run has more than one."""
    tables = [table for run in runs if (table := ranks(run, len(runs) > 1)) is not None]
    return _section("ranks", "Ranks compared", *tables) if tables else None


def settings(runs: Sequence[RunData]) -> Markup:
    """Settings, versions and the log's warnings of each run."""
    parts = []
    for i, run in enumerate(runs):
        name = tag("h3", run.name, class_="run-name") if len(runs) > 1 else None
        rows = [[key, _short(value)] for key, value in flat(run.history.settings)]
        facts = [[key, _short(value)] for key, value in flat(run.history.facts)]
        parts += [
            name or Markup(""),
            _fold(f"settings-{i}", f"All settings ({len(rows)})", _table(["key", "value"], rows)),
            _fold(f"facts-{i}", "Versions, device, command", _table(["fact", "value"], facts)),
            _fold(f"pauses-{i}", "Pauses", _pauses(run)),
            _fold(f"log-{i}", *_log(run.history.directory)),
        ]
    return _section("settings", "Settings and log", *parts)


def differences(runs: Sequence[RunData]) -> list[list[Any]]:
    """Settings that are not the same in all runs; where a run was written to doesn't count."""
    each = [dict(flat(run.history.settings)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for one in each for key in one):
        values = [_short(one.get(key, "not there")) for one in each]
        if len(set(values)) > 1 and not key.startswith(("run.dir", "resume")):
            rows.append([key, *values])
    return rows


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """A tree of mappings as dotted keys and values."""
    if not isinstance(tree, Mapping) or not tree:
        return [(prefix[:-1], tree)] if prefix else []
    return [pair for name, value in tree.items() for pair in flat(value, f"{prefix}{name}.")]


def _pauses(run: RunData) -> Markup:
    """How often the clock was stopped for what, and for how long."""
    totals: dict[str, list[float]] = {}
    for event in run.events("pause"):
        totals.setdefault(str(event.get("name")), []).append(number(event.get("seconds")))
    rows = [
        [name, len(each), f"{np.nansum(each):,.1f}", f"{np.nanmax([*each, 0.0]):,.2f}"] for name, each in totals.items()
    ]
    return _table(["pause", "times", "seconds", "longest"], rows)


def _log(directory: Path) -> tuple[str, Markup]:
    """The last warnings and errors in the ranks' logs."""
    lines: list[str] = []
    for path in sorted(directory.glob("rank*.log"))[:MOST_RANKS]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            read = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
        lines += [line for line in read if any(f" {level} " in line[:36] for level in ("WARNING", "ERROR", "CRITICAL"))]
    shown = [line[:1000] for line in sorted(lines)[-LOG_LINES:]]
    body = tag("pre", "\n".join(shown), tabindex="0") if shown else tag("p", "None.", class_="none")
    return f"Warnings and errors in the log ({len(lines)})", body


def _section(key: str, title: str, *children: Any) -> Markup:
    return tag("section", tag("h2", title, id=f"{key}-title"), *children, id=key, aria_labelledby=f"{key}-title")


def _fold(key: str, title: str, body: Markup) -> Markup:
    return tag("details", tag("summary", title), body, id=key, class_="fold")


def _grid(charts: Sequence[Chart], span: Span) -> Markup:
    """Charts beside each other, without lines and charts that have no points."""
    kept = [replace(chart, lines=[line for line in chart.lines if len(line.x)]) for chart in charts]
    return tag("div", *(figure(chart, span) for chart in kept if chart.lines), class_="grid")


def _table(heads: Sequence[Any], rows: Sequence[Sequence[Any]], class_: str | None = None) -> Markup:
    top = tag("tr", *(tag("th", head, scope="col") for head in heads))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    table = tag("table", tag("thead", top), tag("tbody", *body), class_=class_)
    return tag("div", table, class_="scroll", tabindex="0")


def _bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """Parts of one, side by side. Decoration: the numbers stand beside it."""
    drawn, left = [], 0.0
    for colour, part in parts:
        width = max(0.0, min(part, 1.0 - left)) if part == part else 0.0
        drawn.append(tag("rect", x=f"{left:.2%}", y="0", width=f"{width:.2%}", height="100%", class_=f"fill-{colour}"))
        left += width
    return tag("svg", *drawn, class_="bar", aria_hidden="true")


def _swatch(colour: str) -> Markup:
    return tag("span", class_=f"swatch bg-{colour}", aria_hidden="true")


def _named(runs: Sequence[RunData], alone: str) -> list[tuple[str, str, RunData]]:
    """Name and colour of each run's line; a single run's line is called what it shows."""
    return [(alone if len(runs) == 1 else run.name, f"run{i}", run) for i, run in enumerate(runs)]


def _thin(name: str, colour: str, run: RunData, column: str, scale: float = 1.0) -> Line:
    return thinned(name, colour, run.columns["time"], run.columns[column] * scale, SMALL)


def _without_range(line: Line) -> Line:
    return Line(line.name, line.colour, line.x, line.y, dots=line.dots)


def _times(events: Sequence[Mapping[str, Any]]) -> Floats:
    return np.array([number(event["time"]) for event in events])


def _short(value: Any) -> str:
    """A setting as YAML would have it, cut off where it is very long."""
    words = {None: "null", True: "true", False: "false"}
    found = words[value] if value is None or isinstance(value, bool) else str(value)
    return found if len(found) <= LONGEST else f"{found[:LONGEST]} ..."
