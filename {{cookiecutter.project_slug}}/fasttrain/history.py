"""Reading back what a run left in its directory: settings, facts, and each rank's records and events. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
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
        ranks.append(Rank(number, [record for row in _rows(path) if (record := record_of(row))], events))
    return History(
        directory,
        dict(yaml.safe_load(settings.read_text()) or {}) if settings.exists() else {},
        dict(json.loads(facts.read_text())) if facts.exists() else {},
        ranks,
    )


def last(rank: Rank, seconds: float) -> Rank:
    """The records of the last so many seconds of one rank, with its events, also those that hold for longer."""
    if not rank.records:
        return rank
    end = rank.records[-1].time
    return between(rank, end - seconds, math.inf)


def between(rank: Rank, begin: float, end: float) -> Rank:
    """The same from one moment (included) to another."""
    events = [e for e in rank.events if begin <= e["time"] < end or e["event"] in ("loader", "graph")]
    return Rank(rank.number, [record for record in rank.records if begin <= record.time < end], events)


def record_of(row: Mapping[str, Any]) -> BatchRecord | None:
    """A line of ``rank<r>.jsonl``; None for one of another kind."""
    known = {name: row[name] for name in BatchRecord._fields if name in row}
    try:
        return BatchRecord(**known)
    except TypeError:
        return None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # half written: the training goes on, or was killed
                continue
            if isinstance(row, dict):
                yield row
