"""What the last batches add up to. Pure arithmetic on records: no clock, no terminal, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from fasttrain.records import PHASES, BatchRecord

WARM_UP = 2  # batches at a run's start that the window leaves out: workers start, kernels are chosen
STEADY = 20  # batches in the window from which its shares can be relied on


@dataclass(frozen=True)
class Summary:
    """What the batches in the window add up to. Times in seconds."""

    epoch: int  # of the last batch
    step: int
    batches: int  # in the window
    wall: float  # median
    phases: dict[str, tuple[float, float]]  # name: share of the summed wall time (0 to 1), median
    images_per_second: float  # of all ranks
    data_ratio: float | None  # time the loader needs for a batch, over the time the rest of the batch takes
    long_waits: int  # batches whose wait was longer than half of the rest
    ready: int | None  # batches ready in the loader when the last one was asked for
    ready_mean: float | None
    loss: float | None  # of the last batch that has one
    loss_mean: float | None
    lr: float | None
    steady: bool  # enough batches to rely on


class Window:
    """The last `size` batches, without the run's first `WARM_UP`.

    Args:
        size: batches.
        world: number of ranks; a rank's images per second are multiplied by it.
        workers: loader processes of this rank.
    """

    def __init__(self, size: int, world: int = 1, workers: int = 0) -> None:
        self.seen = 0  # batches, warm-up included
        self._world, self._workers = world, workers
        self._records: deque[BatchRecord] = deque(maxlen=size)

    def add(self, records: Iterable[BatchRecord]) -> None:
        for record in records:
            self.seen += 1
            if self.seen > WARM_UP:
                self._records.append(record)

    def summary(self) -> Summary | None:
        """None as long as the window is empty."""
        records = self._records
        if not records:
            return None
        last = records[-1]
        wall = sum(record.wall for record in records)
        rest = wall - sum(record.wait for record in records)
        losses = [float(record.loss) for record in records if record.loss is not None]
        ready = [record.ready for record in records if record.ready is not None]
        return Summary(
            epoch=last.epoch,
            step=last.step,
            batches=len(records),
            wall=median(record.wall for record in records),
            phases={name: self._phase(name, wall) for name in PHASES},
            images_per_second=_over(sum(record.images for record in records) * self._world, wall) or 0.0,
            data_ratio=self._data_ratio(rest),
            long_waits=sum(record.wait > (record.wall - record.wait) / 2 for record in records),
            ready=ready[-1] if ready else None,
            ready_mean=fmean(ready) if ready else None,
            loss=losses[-1] if losses else None,
            loss_mean=sum(losses) / len(losses) if losses else None,  # NaN if one is: it must be seen
            lr=next((record.lr for record in reversed(records) if record.lr is not None), None),
            steady=len(records) >= min(STEADY, records.maxlen or STEADY),
        )

    def _phase(self, name: str, wall: float) -> tuple[float, float]:
        times = [getattr(record, name) for record in self._records]
        return _over(sum(times), wall) or 0.0, median(times)

    def _data_ratio(self, rest: float) -> float | None:
        if self._workers == 0:
            return _over(sum(record.wait for record in self._records), rest)
        made = [record.made for record in self._records if record.made is not None]
        return _over(fmean(made) / self._workers, rest / len(self._records)) if made else None


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
