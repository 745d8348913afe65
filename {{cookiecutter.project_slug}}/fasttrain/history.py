"""Reading back what a run left in its directory: settings, facts, and each rank's records and events. No torch."""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fasttrain.errors import UserError, one_line
from fasttrain.records import BatchRecord

FAR = 1e12  # seconds; no time of an event lies beyond
BLOCK = 1000  # lines that are parsed at once


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
    collects = gc.isenabled()
    gc.disable()  # it would look through the million new objects of a long run again and again: a third of the time
    try:
        ranks = [
            _rank(directory, int(path.stem[4:])) for path in directory.glob("rank*.jsonl") if path.stem[4:].isdigit()
        ]
    finally:
        if collects:
            gc.enable()
    ranks.sort(key=lambda rank: rank.number)
    return History(directory, _mapping(settings, yaml.safe_load), _mapping(facts, json.loads), ranks)


def _rank(directory: Path, number: int) -> Rank:
    events = [
        row
        for row in _rows(directory / f"events{number}.jsonl")
        if isinstance(row.get("event"), str) and type(row.get("time")) in _NUMBER and abs(row["time"]) < FAR
    ]
    records = [record for row in _rows(directory / f"rank{number}.jsonl") if (record := record_of(row))]
    return Rank(number, records, events)


def _mapping(path: Path, parse: Callable[[str], Any]) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: can't be read ({one_line(error)})") from None
    return found if isinstance(found, dict) else {}


class Tail:
    """The JSON lines that were added to a file since the last call: whole ones only, damaged ones left out."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, 0

    def __call__(self) -> list[dict[str, Any]]:
        try:
            with self._file.open("rb") as opened:
                opened.seek(self._at)
                text = opened.read()
        except OSError:  # not begun, or written on another machine
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return [row for line in whole.splitlines() if isinstance(row := _value(line), dict)]


_NEEDED, _OPTIONAL = BatchRecord._fields[:11], BatchRecord._fields[11:]
_NUMBER, _OR_NOTHING = frozenset((int, float)), frozenset((int, float, type(None)))


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
        while lines := list(itertools.islice(file, BLOCK)):
            yield from (row for row in _parsed(lines) if isinstance(row, dict))


def _parsed(lines: list[str]) -> list[Any]:
    """Many lines at once, which is twice as fast; one by one if there is one among them that can't be read."""
    rows = _value(f"[{','.join(lines)}]")
    return rows if rows is not None and len(rows) == len(lines) else [_value(line) for line in lines]


def _value(text: str | bytes) -> Any:
    """None for what is half written: the training goes on, or was killed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
