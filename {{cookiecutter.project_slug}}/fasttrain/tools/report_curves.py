"""The sections of the report that draw: time, learning, machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fasttrain.records import PHASES
from fasttrain.tools.markup import Markup, tag
from fasttrain.tools.report_charts import Chart, Span, figure
from fasttrain.tools.report_data import (
    Floats,
    Line,
    RunData,
    gauge,
    numbers,
    shares,
    stacked,
    thinned,
    throughput,
    validations,
)
from fasttrain.tools.report_parts import bar, section, swatch, table

SMALL = 160  # points of a line in a small chart


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
    return section("time", "Where the time goes", *parts, _grid(charts, span))


def _phases(run: RunData) -> Markup:
    """Each phase's share and median: the same as the panel on a terminal."""
    parts = shares(run.columns)
    if not parts:
        return tag("p", "No batches yet.", class_="none")
    rows = [
        [tag("span", swatch(phase), phase), bar([(phase, share)]), f"{share:.1%}", f"{middle:,.2f}"]
        for phase, (share, middle) in parts.items()
    ]
    return tag("div", table(["phase", "", "share", "median ms"], rows), class_="phases")


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
    return section("learning", "Learning", _grid(charts, span))


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
    return section("machine", "Machine", body)


def busiest(run: RunData) -> tuple[Floats, Floats]:
    """Times, and the load of the core that was busiest."""
    rows = [event for event in run.events("gauges") if isinstance(event.get("cores"), list) and event["cores"]]
    peaks = numbers(
        max((core for core in event["cores"] if type(core) in (int, float)), default=None) for event in rows
    )
    return run.timeline(_times(rows)), peaks


def _grid(charts: Sequence[Chart], span: Span) -> Markup:
    """Charts beside each other, without lines and charts that have no points."""
    kept = [replace(chart, lines=[line for line in chart.lines if len(line.x)]) for chart in charts]
    return tag("div", *(figure(chart, span) for chart in kept if chart.lines), class_="grid")


def _named(runs: Sequence[RunData], alone: str) -> list[tuple[str, str, RunData]]:
    """Name and colour of each run's line; a single run's line is called what it shows."""
    return [(alone if len(runs) == 1 else run.name, f"run{i}", run) for i, run in enumerate(runs)]


def _thin(name: str, colour: str, run: RunData, column: str, scale: float = 1.0) -> Line:
    return thinned(name, colour, run.columns["time"], run.columns[column] * scale, SMALL)


def _without_range(line: Line) -> Line:
    return Line(line.name, line.colour, line.x, line.y, dots=line.dots)


def _times(events: Sequence[Mapping[str, Any]]) -> Floats:
    return numbers(event["time"] for event in events)
