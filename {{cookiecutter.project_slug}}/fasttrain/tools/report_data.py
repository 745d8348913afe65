"""What the report shows of a run: its records thinned out to a few hundred points, whatever its length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain.history import History
from fasttrain.judge import Verdict, judge
from fasttrain.records import PHASES, BatchRecord
from fasttrain.window import WARM_UP

Floats = NDArray[np.float64]
COLUMNS = ("time", "wall", *PHASES, "images", "loss", "lr", "ready")
POINTS = 240  # of a line, at most
GAP = 60.0  # seconds without a record or a gauge, after which a run counts as stopped and resumed


@dataclass(frozen=True)
class Line:
    """One line of a chart: points, and where it was thinned out the least and the largest value behind each."""

    name: str
    colour: str  # a custom property of report.css
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    dots: bool = False


@dataclass
class Timeline:
    """Seconds since the run began to seconds that it ran: what lies between a stop and a resumption is cut out.

    Attributes:
        ends, lost: of each gap, its end and the seconds cut out up to there.
    """

    ends: Floats
    lost: Floats

    @classmethod
    def of(cls, times: Floats) -> Timeline:
        times = np.sort(times[np.isfinite(times)])
        gaps = np.diff(times)
        where = gaps > GAP
        return cls(times[1:][where], np.cumsum(gaps[where]))

    def __call__(self, times: Floats) -> Floats:
        lost = np.concatenate([[0.0], self.lost])
        found: Floats = times - lost[np.searchsorted(self.ends, times, side="right")]
        return found

    def resumed(self) -> list[float]:
        """When, on this line, the run went on."""
        return [float(each) for each in self(self.ends)]


@dataclass
class RunData:
    """A run as the page needs it."""

    name: str
    history: History
    verdict: Verdict
    timeline: Timeline
    ranks: list[tuple[int, dict[str, Floats]]]  # number, and the columns without the first batches
    seconds: float  # that it ran

    @property
    def columns(self) -> dict[str, Floats]:
        return self.ranks[0][1]

    @property
    def world(self) -> int:
        found = number(self.history.facts.get("world_size"))
        return int(found) if found == found and 0 < found < 1e6 else len(self.ranks)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of rank 0."""
        return self._events.get(kind, [])

    @cached_property
    def _events(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for event in self.history.ranks[0].events:
            found.setdefault(str(event["event"]), []).append(event)
        return found


def prepare(history: History, name: str) -> RunData:
    """Arrays, timeline and verdict of a run that was read."""
    ranks = [(rank.number, columns(rank.records)) for rank in history.ranks]
    seen = [numbers(event["time"] for event in rank.events) for rank in history.ranks]
    times = np.concatenate([np.zeros(1), *seen, *(each["time"] for _, each in ranks)])
    timeline = Timeline.of(times)
    verdict = _judged(history)
    ranks = [(rank, {**each, "time": timeline(each["time"])}) for rank, each in ranks]
    return RunData(name, history, verdict, timeline, ranks, float(np.nanmax(timeline(times))))


def _judged(history: History) -> Verdict:
    try:
        return judge(history.ranks, history.settings, history.facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Of another version, or changed by hand. Curves and tables can be shown all the same.
        return Verdict((), False, f"these records can't be judged ({type(error).__name__}: {error})")


def columns(records: Sequence[BatchRecord]) -> dict[str, Floats]:
    """The records as columns, without the run's first batches; what isn't a number is NaN."""
    kept = records[WARM_UP:] if len(records) > WARM_UP else ()
    places = [BatchRecord._fields.index(name) for name in COLUMNS]
    return {name: numbers(record[at] for record in kept) for name, at in zip(COLUMNS, places, strict=True)}


def numbers(values: Iterable[Any]) -> Floats:
    """What isn't a finite number becomes NaN."""
    listed = list(values)
    try:
        found = np.array(listed, dtype=np.float64)  # None becomes NaN
        assert found.ndim == 1
    except (AssertionError, TypeError, ValueError, OverflowError):
        found = np.array([number(value) for value in listed])
    found[~np.isfinite(found)] = np.nan
    return found


def number(value: Any) -> float:
    """A finite float, or NaN."""
    try:
        found = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # a whole number beyond floats
        return math.nan
    return found if math.isfinite(found) else math.nan


def places(x: Floats, points: int = POINTS) -> NDArray[np.int64]:
    """The start of each stretch that one point stands for, in sorted times: equal stretches of time, none empty."""
    if len(x) <= points:
        return np.arange(len(x))
    edges = np.linspace(x[0], x[-1], points + 1)[:-1]
    found: NDArray[np.int64] = np.unique(np.searchsorted(x, edges))
    return found


def thinned(name: str, colour: str, x: Floats, y: Floats, points: int = POINTS, dots: bool = False) -> Line:
    """Means over stretches of time, with the least and the largest value; short lines stay as they are."""
    known = np.isfinite(x) & np.isfinite(y)
    order = np.argsort(x[known], kind="stable")
    x, y = x[known][order], y[known][order]
    if len(x) <= points:
        return Line(name, colour, x, y, dots=dots)
    at = places(x, points)
    count = np.diff(np.append(at, len(x)))
    return Line(
        name,
        colour,
        np.add.reduceat(x, at) / count,
        np.add.reduceat(y / len(y), at) * (len(y) / count),  # divided first: sums of huge numbers stay finite
        np.minimum.reduceat(y, at),
        np.maximum.reduceat(y, at),
        dots,
    )


def stacked(columns: Mapping[str, Floats], points: int = POINTS) -> tuple[Floats, dict[str, Floats]]:
    """Times, and for each phase its mean milliseconds a batch around them."""
    known = np.isfinite(columns["time"])
    for phase in PHASES:
        known &= np.isfinite(columns[phase])
    order = np.argsort(columns["time"][known], kind="stable")
    x = columns["time"][known][order]
    if not len(x):
        return x, dict.fromkeys(PHASES, x)
    at = places(x, points)
    count = np.diff(np.append(at, len(x)))
    means = {phase: np.add.reduceat(columns[phase][known][order], at) / count * 1e3 for phase in PHASES}
    return np.add.reduceat(x, at) / count, means


def throughput(columns: Mapping[str, Floats], world: int, points: int = POINTS) -> tuple[Floats, Floats]:
    """Times, and images of all processes over the wall time of the batches around them."""
    known = np.isfinite(columns["time"]) & (columns["wall"] > 0) & np.isfinite(columns["images"])
    order = np.argsort(columns["time"][known], kind="stable")
    x = columns["time"][known][order]
    if not len(x):
        return x, x
    at = places(x, points)
    count = np.diff(np.append(at, len(x)))
    images, wall = (np.add.reduceat(columns[name][known][order], at) for name in ("images", "wall"))
    return np.add.reduceat(x, at) / count, images * world / wall


def shares(columns: Mapping[str, Floats]) -> dict[str, tuple[float, float]]:
    """Of each phase: its part of the wall time (0 to 1), and its median in milliseconds."""
    total = sum(float(np.nansum(columns[phase])) for phase in PHASES)
    if not total > 0:
        return {}
    return {
        phase: (float(np.nansum(columns[phase])) / total, float(np.nanmedian(columns[phase])) * 1e3) for phase in PHASES
    }


def gauge(run: RunData, name: str) -> tuple[Floats, Floats]:
    """Times and values of one gauge, on rank 0's machine."""
    rows = [event for event in run.events("gauges") if name in event]
    return run.timeline(numbers(event["time"] for event in rows)), numbers(event[name] for event in rows)


def validations(run: RunData) -> dict[str, tuple[Floats, Floats]]:
    """Of each metric: times and values."""
    skipped = ("time", "event", "epoch", "step", "improved")
    found: dict[str, list[tuple[Any, Any]]] = {}
    for event in run.events("validation"):
        for name, value in event.items():
            if name not in skipped and isinstance(value, (int, float)):
                found.setdefault(name, []).append((event["time"], value))
    return {
        name: (run.timeline(numbers(t for t, _ in rows)), numbers(value for _, value in rows))
        for name, rows in found.items()
    }
