"""What the loader gives and what the step takes: the two measurements that come before any advice about data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from fasttrain.evidence import Side, ms, percent
from fasttrain.records import BatchRecord

HANDED_OVER = 0.0005  # seconds that taking a batch costs that lies ready
LATE = 0.005  # a longer wait is one for a batch that was not ready, however many others were
ENOUGH = 0.9  # of the time of a step: a loader that needs less for a batch is fast enough on average
HICCUP = 3.0  # times the median: a batch that took longer to make came late by itself
CROWDED = 0.15  # part of the time that the training thread stands in the queue for a core
MOST_WORKERS = 16


@dataclass(frozen=True)
class Supply:
    """What the loader gives and the step takes, in seconds a batch; means."""

    side: Side
    share: float  # waited, of the wall time
    sure: float
    late: list[float]  # for each record the seconds waited beyond the hand-over
    workers: int
    rest: float  # of a step without waiting
    made: float  # by one worker
    cpu: float
    queued: float
    asleep: float
    samples: int  # a batch
    free: float  # the same rest, less what the training thread stood in the queue for a core

    @property
    def every(self) -> float:
        """Seconds between two batches of all workers."""
        return self.made / max(1, self.workers)

    @property
    def enough(self) -> bool:
        """Whether the loader, given the cores it works on, is fast enough on average."""
        return (self.made - self.queued) / max(1, self.workers) <= ENOUGH * self.free

    @property
    def cores(self) -> float:
        """For this rank, CPU quota considered."""
        loader = self.side.loader
        total = loader.get("quota") or loader.get("cores") or max(1, self.workers)
        return max(0.1, min(float(total), float(loader.get("cores") or total)) / int(loader.get("local_ranks") or 1))

    def with_workers(self, count: int) -> float:
        """Seconds of a step to expect: the loader's or the rest, whichever is longer."""
        return max(self.rest, (self.cpu + self.asleep) / count, self.cpu / self.cores)

    def best_workers(self) -> int:
        """The fewest from which more would bring nothing: the step is the limit then, or the cores."""
        bound = max(self.free * ENOUGH, self.cpu / self.cores)
        wanted = math.ceil((self.cpu + self.asleep) / max(bound, 1e-9))
        most = MOST_WORKERS if self.asleep > self.cpu else min(MOST_WORKERS, math.ceil(self.cores))
        return max(1, min(wanted, most))

    @property
    def numbers(self) -> str:
        """The two measurements that come before any advice."""
        late = sum(record.wait > (record.wall - record.wait) / 2 for record in self.side.records)
        loader = f"{self.workers} workers give one every {ms(self.every)}" if self.workers > 1 else "one at a time"
        return (
            f"a step takes {ms(self.rest)} without waiting, a batch {ms(self.made)} to make ({loader}): "
            f"data/compute {self.every / max(self.rest, 1e-9):.2f}; {percent(self.share)} of the time is waiting, "
            f"in {late} of {len(self.side.records)} batches longer than half a step"
        )


def supply_of(side: Side, share: float, sure: float, late: list[float]) -> Supply:
    made, cpu, queued = side.mean("made"), side.mean("made_cpu"), side.mean("made_queued")
    if not cpu:  # records of an older run
        cpu = made
    rest = fmean(record.wall - record.wait for record in side.records)
    in_queue = side.thread[2] / side.thread[0] * side.mean("wall") if side.thread else 0.0
    return Supply(
        side,
        share,
        sure,
        late,
        int(side.loader.get("workers") or len({r.worker for r in side.records if r.worker is not None})),
        rest,
        made,
        cpu,
        queued,
        max(0.0, made - cpu - queued),
        round(fmean(record.images for record in side.records)),
        max(0.1 * rest, rest - in_queue),
    )


def late_seconds(record: BatchRecord, side: Side) -> float:
    """Seconds of this wait for which the loader is to blame."""
    workers = int(side.loader.get("workers") or 0)
    if record.worker is None and record.made is not None:
        return record.wait
    lies_ready = record.ready is not None and record.ready >= max(1, workers) and record.wait < LATE
    return 0.0 if lies_ready else max(0.0, record.wait - HANDED_OVER)


def tail_of(supply: Supply) -> float:
    """Part of the making that went into single slow samples, or into single slow batches."""
    records = [record for record in supply.side.records if record.made is not None]
    total = sum(worked(record) for record in records)
    if total <= 0:
        return 0.0
    usual = HICCUP * median(worked(record) for record in records)
    slow = [max((record.tail or 0.0) - (record.made_queued or 0.0), worked(record) - usual, 0.0) for record in records]
    return sum(slow) / total


def worked(record: BatchRecord) -> float:
    """Seconds that the worker took for it, less what it stood in the queue for a core."""
    return max(0.0, (record.made or 0.0) - (record.made_queued or 0.0))


def crowded(side: Side) -> bool:
    """Whether the training thread itself often stood in the queue for a core."""
    return side.thread is not None and side.thread[2] > CROWDED * side.thread[0]


def throttled(side: Side) -> float:
    """Part of the time that a CPU quota made the container stand still, from the gauges."""
    marks = [(g["time"], float(g["throttled"])) for g in side.gauges if g.get("throttled") is not None]
    if len(marks) < 2 or marks[-1][0] <= marks[0][0]:
        return 0.0
    return float(marks[-1][1] - marks[0][1]) / float(marks[-1][0] - marks[0][0])
