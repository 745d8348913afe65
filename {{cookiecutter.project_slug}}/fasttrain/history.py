"""Reading back what a run left in its directory: settings, facts, and each rank's records and events. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fasttrain.errors import UserError
from fasttrain.records import BatchRecord


@dataclass
class Rank:
    """What one rank wrote. Times in seconds since the run began."""

    number: int
    records: list[BatchRecord] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)  # each has "time" and "event"


@dataclass
class History:
    """A run as its directory tells it."""

    directory: Path
    settings: Mapping[str, Any]  # config.yaml: references unresolved
    facts: Mapping[str, Any]  # run.json
    ranks: list[Rank]


def read(directory: Path) -> History:
    """Read a run directory, also of a training that runs: a last line that is half written is left out.

    Raises:
        UserError: there is no run in that folder.
    """
    if not (directory / "rank0.jsonl").exists():
        raise UserError(f"{directory}: holds no run (rank0.jsonl is missing)")
    facts, settings = directory / "run.json", directory / "config.yaml"
    ranks = []
    for path in sorted(directory.glob("rank*.jsonl"), key=lambda each: int(each.stem[4:])):
        number = int(path.stem[4:])
        events = [row for row in _rows(directory / f"events{number}.jsonl") if "event" in row and "time" in row]
        ranks.append(Rank(number, [record for row in _rows(path) if (record := _record(row))], events))
    return History(directory, _mapping(settings, yaml.safe_load), _mapping(facts, json.loads), ranks)


def _mapping(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: can't be read ({' '.join(str(error).split())[:200]})") from None
    return found if isinstance(found, dict) else {}


_NEEDED, _OPTIONAL = BatchRecord._fields[:11], BatchRecord._fields[11:]
_NUMBER, _OR_NOTHING = frozenset((int, float)), frozenset((int, float, type(None)))


def last(rank: Rank, seconds: float) -> Rank:
    """The records of the last so many seconds of one rank, with its events, also those that hold for longer."""
    if not rank.records:
        return rank
    since = rank.records[-1].time - seconds
    events = [event for event in rank.events if event["time"] >= since or event["event"] in ("loader", "graph")]
    return Rank(rank.number, [record for record in rank.records if record.time >= since], events)


def _record(row: Mapping[str, Any]) -> BatchRecord | None:
    """None for a line of another kind, or one whose values are not numbers."""
    try:
        needed = [*map(row.__getitem__, _NEEDED)]
        if not _NUMBER.issuperset(map(type, needed)) or not math.isfinite(sum(needed)):
            return None
    except (KeyError, OverflowError):  # a whole number beyond floats
        return None
    optional = [*map(row.get, _OPTIONAL)]
    return BatchRecord(*needed, *optional) if _OR_NOTHING.issuperset(map(type, optional)) else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # half written: the training goes on, or was killed
                continue
            if isinstance(row, dict):
                yield row
