"""Growth of memory and of open files: it costs no time today, and ends the training tomorrow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fasttrain.evidence import Side
from fasttrain.findings import Finding

POINTS = 5  # readings, at least
SPAN = 3.0  # seconds that they span, at least
SETTLED = 0.25  # part of them at the start that is left out: caches fill, allocators grow
STEPS_UP = 0.75  # part of the steps from one reading to the next that must lead up
MEMORY = 24e6  # bytes of growth, at least, and this much of what was there at first
PART = 0.03
FILES = 12  # handles


def find(side: Side) -> list[Finding]:
    """Growth in the training process, and in its loader workers."""
    findings = []
    places: list[tuple[str, Sequence[Mapping[str, Any]]]] = [("the training process", side.gauges)]
    places += [(f"loader worker {rows[0]['worker']}", rows) for rows in side.workers.values() if rows]
    for kind, found in (("private", _memory), ("open_files", _files)):
        grown = [
            (where, *rise)
            for where, rows in places
            if (rise := _rise([(r["time"], float(r[kind])) for r in rows if r.get(kind) is not None])) is not None
        ]
        if finding := found(side, grown):
            findings.append(finding)
    return findings


def _rise(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float] | None:
    """First and last value, seconds between them, and growth a second (Theil and Sen's slope); None: no steady rise."""
    points = points[round(SETTLED * len(points)) :]
    if len(points) < POINTS or points[-1][0] - points[0][0] < SPAN:
        return None
    if len(points) > 60:  # the slope looks at all pairs
        points = [points[i * (len(points) - 1) // 59] for i in range(60)]
    steps = [b[1] - a[1] for a, b in itertools.pairwise(points)]
    half = len(steps) // 2
    if sum(step > 0 for step in steps) < STEPS_UP * len(steps) or sum(steps[half:]) < 0.25 * sum(steps):
        return None  # it levels off
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return points[0][1], points[-1][1], points[-1][0] - points[0][0], median(slopes)


Grown = Sequence[tuple[str, float, float, float, float]]


def _memory(side: Side, grown: Grown) -> Finding | None:
    real = [g for g in grown if g[2] - g[1] >= max(MEMORY, PART * g[1])]
    if not real:
        return None
    rate = sum(g[4] for g in real)
    where, first, last, seconds, _ = max(real, key=lambda g: g[4])
    steps = len(side.records) / max(side.elapsed, 1e-9)
    gauge = next((g for g in reversed(side.gauges) if g.get("memory_total") and g.get("memory_used")), None)
    left = None if gauge is None else (gauge["memory_total"] - gauge["memory_used"]) / rate
    soon = "" if left is None else f"; at this rate memory is full in {_time(left)}"
    who = where if len(real) == 1 else f"{where} and {len(real) - 1} more"
    return Finding(
        "memory",
        0.0,
        0.95,
        f"memory grows in {who}",
        f"{first / 1e6:.0f} -> {last / 1e6:.0f} MB in {seconds:.0f} s, {rate / 1e6:.1f} MB a second, "
        f"about {rate / max(steps, 1e-9) / 1e6:.2f} MB a batch{soon}",
        "look for what is kept from step to step: losses kept with their graph (keep loss.detach()), lists that only "
        "grow, caches in the data set; data.persistent_workers=false starts workers anew each epoch meanwhile",
        weight=1.0 if left is not None and left < 3600 else 0.3,
    )


def _files(side: Side, grown: Grown) -> Finding | None:
    real = [g for g in grown if g[2] - g[1] >= FILES]
    if not real:
        return None
    where, first, last, seconds, rate = max(real, key=lambda g: g[4])
    most = side.loader.get("most_files")
    soon = f"; the limit of {most} is reached in {_time((most - last) / rate)}" if most else ""
    return Finding(
        "files",
        0.0,
        0.95,
        f"open files pile up in {where}",
        f"{first:.0f} -> {last:.0f} handles in {seconds:.0f} s, {rate:.1f} a second{soon}",
        "close what is opened: `with open(...)`, `with Image.open(...)`; one database handle a process",
        weight=0.95 if most and (most - last) / rate < 3600 else 0.29,
    )


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
