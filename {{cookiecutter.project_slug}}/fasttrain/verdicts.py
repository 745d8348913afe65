"""The verdict while a training runs: judged every few seconds on rank 0, in the recorder's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasttrain import history
from fasttrain.history import Rank
from fasttrain.judge import Verdict, judge
from fasttrain.records import BatchRecord

EVERY = 5.0  # seconds between two judgements; one takes about 10 ms of the recorder's thread
KEPT = 4000  # batches that the closing words rest on, the last ones
RECENT = 1000  # batches that a judgement in between rests on
EVENTS = 2000
LASTING = ("loader", "graph", "pause")  # events that are kept apart, however many others come


class Kept:
    """The last records and events of one rank, since it was started or resumed."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: deque[BatchRecord] = deque(maxlen=KEPT)
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.lasting: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self._start = 0.0  # what other ranks wrote before is of an earlier process, and rank 0 knows only its own

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "pause" and event.get("name") == "startup":
            self._start = float(event["time"])
        (self.lasting if event["event"] in LASTING else self.events).append(event)

    def rank(self, most: int) -> Rank:
        records = [*self.records][-most:]
        since = records[0].time - records[0].wall if len(self.records) > most else 0.0
        events = sorted((*self.lasting, *self.events), key=lambda event: float(event["time"]))
        return history.between(Rank(self.number, records, events), max(since, self._start), float("inf"))


class Follower:
    """Reads what another rank of this run writes, from where it stopped last."""

    def __init__(self, directory: Path, number: int) -> None:
        self.kept = Kept(number)
        self._records = history.Tail(directory / f"rank{number}.jsonl")
        self._events = history.Tail(directory / f"events{number}.jsonl")

    def read(self) -> None:
        self.kept.records.extend(record for row in self._records() if (record := history.record_of(row)) is not None)
        for row in self._events():
            if "event" in row and "time" in row:
                self.kept.take(row)


class LiveVerdict:
    """A view on the records; `says` is the verdict in one line, for the dashboard.

    Args:
        directory: the run directory, where the other ranks write too.
        world: number of ranks.
        settings: config.yaml as the run saved it.
    """

    def __init__(self, directory: Path, world: int, settings: Mapping[str, Any]) -> None:
        self.says: str | None = None
        self._settings = settings
        self._own = Kept(0)
        self._others = [Follower(directory, number) for number in range(1, world)]
        self._next, self._new = 0.0, False

    def batches(self, records: list[BatchRecord]) -> None:
        self._own.records.extend(records)
        self._new = True

    def event(self, event: dict[str, Any]) -> None:
        self._own.take(event)

    def draw(self, now: float) -> None:
        if self._new and now >= self._next:
            self._new, self._next = False, now + EVERY
            self.says = self.verdict(RECENT).says

    def close(self) -> None:
        return None

    def verdict(self, most: int = KEPT) -> Verdict:
        """Over the last so many batches."""
        for follower in self._others:
            follower.read()
        kept = [self._own, *(follower.kept for follower in self._others)]
        return judge([each.rank(most) for each in kept if each.records], self._settings, {})
