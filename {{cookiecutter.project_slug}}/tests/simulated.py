"""Trainings on paper: records as a loader with so many workers and a step of so many seconds would give them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fasttrain.history import Rank
from fasttrain.records import BatchRecord


@dataclass(frozen=True)
class Made:
    """What one batch costs a worker, in seconds."""

    cpu: float = 0.005
    asleep: float = 0.0
    queued: float = 0.0
    assembly: float = 0.0002
    tail: float = 0.0  # of cpu or asleep, in slow samples
    slowest: float = 0.001

    @property
    def seconds(self) -> float:
        return self.cpu + self.asleep + self.queued


@dataclass(frozen=True)
class Training:
    """A training on paper. Seconds a batch unless said otherwise."""

    batches: int = 200
    workers: int = 2
    prefetch: int = 4
    cores: float = 4
    local_ranks: int = 1
    copy: float = 0.0
    forward: float = 0.012
    backward: float = 0.012
    optimizer: float = 0.001
    other: float = 0.0001
    backward_cpu: float | None = 0.011
    noise: float = 0.05  # spread of each time, as a part of it
    made: Callable[[int, int], Made] = lambda batch, worker: Made()
    step: Callable[[int, dict[str, float]], None] = lambda batch, phases: None  # changes the phases of one batch
    epoch: int = 10**9  # batches
    stall: float = 0.0  # until the first batch of an epoch
    loader: tuple[tuple[str, Any], ...] = ()
    behind: int | None = None
    seed: int = 0

    def rank(self, number: int = 0, events: tuple[dict[str, Any], ...] = ()) -> Rank:
        """The records and events of one rank."""
        draw = random.Random(self.seed * 1000 + number)
        now, free = 5.0, [5.0] * max(1, self.workers)
        taken: list[float] = []
        finished: list[float] = []
        effort: list[Made] = []
        records = []
        for i in range(self.batches):
            worker, epoch = i % max(1, self.workers), i // self.epoch
            ahead = self.workers * self.prefetch  # batches that were asked for besides this one
            last = (i // self.epoch + 1) * self.epoch if self.stall else 10**9  # new workers know only their epoch
            for j in range(len(effort), min(i + max(1, ahead), last)):
                of = j % max(1, self.workers)
                made = self.made(j, of)
                made = replace(made, cpu=made.cpu * self._spread(draw), asleep=made.asleep * self._spread(draw))
                asked = max(free[of], taken[j - ahead] if j >= ahead > 0 else 5.0)
                if j and j % self.epoch == 0:
                    asked = max(asked, now) + self.stall
                free[of] = asked + made.seconds
                effort.append(made)
                finished.append(free[of])
            made = effort[i]
            ready = sum(end <= now for end in finished) - i if self.workers else None
            wait = max(0.0, finished[i] - now) + 0.0002 if self.workers else made.seconds
            phases = {name: getattr(self, name) * self._spread(draw) for name in PHASES}
            self.step(i, phases)
            now += wait
            taken.append(now)
            now += sum(phases.values())
            records.append(
                BatchRecord(
                    epoch, i + 1, now, wait + sum(phases.values()), wait, **phases, images=32,
                    made=made.seconds, worker=worker if self.workers else None, ready=ready, behind=self.behind,
                    backward_cpu=self.backward_cpu, made_cpu=made.cpu, made_queued=made.queued,
                    assembly=made.assembly, slowest=made.slowest, tail=made.tail,
                )
            )  # fmt: skip
        loader = {
            "workers": self.workers, "slots": True, "why_no_slots": None, "pinned": True, "bytes": 4_800_000,
            "types": ["uint8", "int64"], "device": "cpu", "ranks": self.local_ranks, "cores": self.cores,
            "quota": None, "local_ranks": self.local_ranks, "most_files": 1024, **dict(self.loader),
        }  # fmt: skip
        start = {"time": 5.0, "event": "pause", "name": "startup", "seconds": 5.0}
        return Rank(number, records, [start, {"time": 5.1, "event": "loader", **loader}, *events])

    def _spread(self, draw: random.Random) -> float:
        return max(0.2, draw.gauss(1, self.noise))


PHASES = ("copy", "forward", "backward", "optimizer", "other")


def looks(rank: Rank, share: float, kind: str, phase: str = "other", own: str = "train.py:120 train: x") -> None:
    """Adds looks at the training thread, twenty a second, that find it so often at one place."""
    seconds = int(rank.records[-1].time - 5)
    for second in range(1, seconds):
        there = round(20 * share)
        at = [["forward", "model.py:1 f: y", "", "model.py:1 f", 20 - there], [phase, own, kind, "z.py:1 emit", there]]
        rank.events.append(
            {"time": 6.0 + second, "event": "looks", "looks": 20, "seconds": 1.0, "cpu": 0.4, "queued": 0.0, "at": at}
        )


def gauges(rank: Rank, **series: Callable[[float], float]) -> None:
    """Adds a reading a second; each series is a function of the seconds since the start."""
    for second in range(1, int(rank.records[-1].time - 5)):
        values = {name: series[name](float(second)) for name in series}
        rank.events.append({"time": 5.5 + second, "event": "gauges", **values})


def pauses(rank: Rank, name: str, every: float, seconds: float) -> None:
    """Adds pauses of one kind."""
    at, end = 6.0, rank.records[-1].time
    while (at := at + every) < end:
        rank.events.append({"time": at, "event": "pause", "name": name, "seconds": seconds})
