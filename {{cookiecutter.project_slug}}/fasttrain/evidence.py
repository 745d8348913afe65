"""What the verdict rests on: one rank's records and events in order, warm-up left out, and how certain a share is."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from fasttrain.history import Rank
from fasttrain.records import BatchRecord
from fasttrain.window import WARM_UP

LEAST = 16  # batches, and
LEAST_SECONDS = 1.0  # of batches, that a judgement needs
LEAST_LOOKS = 16  # at the training thread
BLOCKS = 8  # parts of the series whose spread says how certain a share is
FLOOR = 0.02  # spread of a share that is assumed at least
SURE = 0.9  # least certainty of a finding


@dataclass(frozen=True)
class Look:
    """Looks at the training thread that found it at one place."""

    phase: str
    own: str  # the owner's line
    kind: str  # logging, saving or nothing
    inner: str  # innermost line
    count: int


@dataclass
class Side:
    """One rank's side of it. Times in seconds."""

    number: int
    records: list[BatchRecord]
    pauses: dict[str, list[float]] = field(default_factory=dict)  # by name; those after which the training went on
    loader: Mapping[str, Any] = field(default_factory=dict)  # the event
    operations: int | None = None  # of a forward pass
    looks: list[Look] = field(default_factory=list)  # pauses left out
    thread: tuple[float, float, float] | None = None  # seconds looked at, on a core, queued for one
    gauges: list[Mapping[str, Any]] = field(default_factory=list)
    workers: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)  # by process: what they hold
    starts: list[float] = field(default_factory=list)  # of the training: more than one if it was resumed

    @property
    def wall(self) -> float:
        """Seconds of batches, pauses left out."""
        return sum(record.wall for record in self.records)

    @property
    def elapsed(self) -> float:
        """With the pauses."""
        return self.wall + sum(sum(each) for each in self.pauses.values())

    @property
    def looked(self) -> int:
        return sum(look.count for look in self.looks)

    def mean(self, name: str) -> float:
        """Of a field of the records, over those that have it."""
        values = [value for record in self.records if (value := getattr(record, name)) is not None]
        return fmean(values) if values else 0.0

    def part(self, name: str) -> float:
        """Of a phase in the wall time."""
        return sum(getattr(record, name) for record in self.records) / self.wall if self.wall else 0.0

    @property
    def enough(self) -> bool:
        return len(self.records) >= LEAST and self.wall >= LEAST_SECONDS


def side_of(rank: Rank) -> Side:
    """Put one rank's records and events in order."""
    starts = [e["time"] for e in rank.events if e["event"] == "pause" and e.get("name") == "startup"]
    loader: Mapping[str, Any] = next((e for e in reversed(rank.events) if e["event"] == "loader"), {})
    graph: Mapping[str, Any] = next((e for e in reversed(rank.events) if e["event"] == "graph"), {})
    # torch.profiler slows these down.
    profiles = [(e["begin"], e["end"]) for e in rank.events if e["event"] == "profile"]
    kept = [r for r in rank.records if not any(begin < r.time <= end for begin, end in profiles)]
    records = _settled(kept, starts, 1 + int(loader.get("workers", 0) or 0))
    side = Side(rank.number, records, loader=loader, operations=graph.get("operations"), starts=starts)
    if not records:
        return side
    begin, end = records[0].time - records[0].wall, records[-1].time
    places: Counter[tuple[str, str, str, str]] = Counter()
    used = [0.0, 0.0, 0.0]
    pauses: dict[str, list[float]] = defaultdict(list)
    for event in rank.events:
        moment, kind = event["time"], event["event"]
        if moment < begin or moment > end + 0.5:
            continue
        if kind == "pause" and moment <= end and event.get("name") != "startup":
            pauses[event["name"]].append(event["seconds"])
        elif kind == "looks" and moment - event["seconds"] >= begin - 0.5:
            for phase, own, what, inner, count in event["at"]:
                places[phase, own, what, inner] += count
            for i, name in enumerate(("seconds", "cpu", "queued")):
                used[i] += event.get(name) or 0.0
        elif kind == "gauges":
            side.gauges.append(event)
        elif kind == "worker":
            side.workers.setdefault(event["pid"], []).append(event)
    side.pauses = dict(pauses)
    side.looks = [Look(*where, count) for where, count in places.most_common() if where[0] != "pause"]
    side.thread = (used[0], used[1], used[2]) if used[0] else None
    return side


def _settled(records: Sequence[BatchRecord], starts: Iterable[float], first: int) -> list[BatchRecord]:
    """Without the first batches after each start of the training: `WARM_UP`, or one from each worker and one more."""
    drop = max(WARM_UP, first)
    skip: set[int] = set()
    for start in starts:
        at = next((i for i, record in enumerate(records) if record.time > start), None)
        if at is not None and abs(records[at].time - records[at].wall - start) < 0.5 + records[at].wall:
            skip.update(range(at, at + drop))
    return [record for i, record in enumerate(records) if i not in skip and math.isfinite(record.wall)]


def sure_above(parts: Sequence[float], wholes: Sequence[float], limit: float) -> tuple[float, float]:
    """Share of `parts` in `wholes`, and how sure it is (0 to 1) that it is above `limit`.

    From the spread between consecutive blocks of the series, so that a single hiccup is no evidence of a habit.
    """
    total = sum(wholes)
    if total <= 0:
        return 0.0, 0.0
    share = sum(parts) / total
    blocks = min(BLOCKS, len(parts) // 4)
    if blocks < 2:
        return share, 0.0
    edges = [round(i * len(parts) / blocks) for i in range(blocks + 1)]
    shares = [sum(parts[a:b]) / max(1e-12, sum(wholes[a:b])) for a, b in itertools.pairwise(edges)]
    spread = max(FLOOR, pstdev(shares)) / math.sqrt(blocks)
    return share, normal((share - limit) / spread)


def sure_of_count(found: int, among: int, limit: float) -> tuple[float, float]:
    """The same for a number of looks."""
    if among == 0:
        return 0.0, 0.0
    share = found / among
    spread = math.sqrt(max(share * (1 - share), limit * (1 - limit)) / among)
    return share, normal((share - limit) / spread)


def normal(z: float) -> float:
    """The normal distribution's probability below z."""
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))


def section_of(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One section of config.yaml; empty if the run has none, as one of an older version may."""
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def ms(seconds: float) -> str:
    """Milliseconds for people: three digits."""
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def percent(share: float) -> str:
    return f"{share:.0%}"
