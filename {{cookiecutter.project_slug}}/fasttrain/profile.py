"""torch.profiler over a few batches: a table of the costliest operations and a trace, in the run directory.

Only a rank that is to be profiled gets this stopwatch; every other training runs without a line of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.profiler import ProfilerActivity, profile, record_function

from fasttrain.clock import Clock
from fasttrain.errors import SettingsError
from fasttrain.transfer import Batch
from fasttrain.watch import NEXT, Sink, Watch

COPY = "copy to device"  # what the copies of batches are called in the trace
ROWS = 40  # of the table
WIDEST = 60  # characters of an operation's name


def wanted(settings: Any, rank: int, world: int) -> bool:
    """Whether this rank is to be profiled, by the section ``profile``.

    Raises:
        SettingsError: a rank that there isn't.
    """
    if settings.steps is None:
        return False
    if not settings.ranks or max(settings.ranks) >= world:
        raise SettingsError("profile.ranks", settings.ranks, f"ranks from 0 to {world - 1}")
    return rank in settings.ranks


class ProfilingWatch(Watch):
    """A stopwatch that also profiles: `steps` batches, after `start` others.

    The profiler makes these batches slower: an event ``profile`` says which they were. Starting it and writing its
    files stops the clock.

    Args:
        sink, clock, started, began: as of `Watch`.
        directory: the run directory. rank: of this process.
        steps, start: batches.
        streams: what copies batches to the device, if it has streams; its copies are named in the trace.
    """

    def __init__(
        self,
        sink: Sink,
        clock: Clock,
        started: float,
        began: float,
        *,
        directory: Path,
        rank: int,
        steps: int,
        start: int,
        streams: Any = None,
    ) -> None:
        super().__init__(sink, clock, started, began)
        self._table, self._trace = directory / f"profile{rank}.txt", directory / f"trace{rank}.json.gz"
        self._steps, self._start, self._streams = steps, start, streams
        self._done = 0  # batches
        self._first: tuple[int, float] = (0, 0.0)  # step and time at which the profile begins
        self._profiler: Any = None
        self._names: list[Any] = []  # that are open in the trace: the step's, and within it the phase's

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        if self._start == self._done == 0:
            self._begin_profile()
        for batch in super().batches(source):
            self._name_phase("forward")
            yield batch

    def mark(self, phase: str) -> None:
        super().mark(phase)
        self._name_phase(NEXT[phase])

    def close(self) -> None:
        if self._profiler is not None:  # fewer batches than were asked for
            self._end_profile()
        elif self._done < self._start:
            logger.warning(f"no profile: profile.start={self._start}, but the run had {self._done} batches")
        super().close()

    def abandon(self) -> None:
        profiler, self._profiler, self._start = self._profiler, None, -1  # none begins any more
        self._end_names(0)
        if profiler is not None:
            with contextlib.suppress(RuntimeError):  # a device in error
                profiler.stop()  # left running it would crash the process at its exit
        super().abandon()

    def _finish(self) -> None:
        ended = self._batch is not None
        super()._finish()
        if not ended:
            return
        self._done += 1
        if self._profiler is None:
            if self._done == self._start:
                self._begin_profile()
        elif self._done >= self._start + self._steps:
            self._end_profile()
        else:
            self._name_step()

    def _begin_profile(self) -> None:
        device = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
        kinds = [kind for name, kind in device.items() if getattr(torch, name).is_available()]
        with self.pause("profile"):
            self._profiler = profile(activities=[ProfilerActivity.CPU, *kinds], record_shapes=True)
            self._profiler.start()
        if self._streams is not None:
            self._streams.copy = named(self._streams.copy)
        self._first = (self._noted[0] + 1, self._now())
        self._name_step()

    def _name_step(self) -> None:
        """The next step begins in the trace, with its wait."""
        self._end_names(0)
        self._names.append(_begin(f"step {self._noted[0] + 1}"))
        self._name_phase("wait")

    def _name_phase(self, phase: str) -> None:
        """The next phase begins in the trace, within the step."""
        if self._names:
            self._end_names(1)
            self._names.append(_begin(phase))

    def _end_names(self, left: int) -> None:
        while len(self._names) > left:
            self._names.pop().__exit__(None, None, None)

    def _end_profile(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._end_names(0)
        if self._streams is not None:
            del self._streams.copy  # the class' own again
        first, begin = self._first
        self.sink.event("profile", first_step=first, last_step=self._noted[0], begin=begin, end=self._now())
        with self.pause("profile"):
            profiler.stop()
            try:
                self._table.write_text(table(profiler.key_averages()), encoding="utf-8")
                profiler.export_chrome_trace(str(self._trace))
            except (OSError, RuntimeError) as error:  # a full disk: the training is worth more
                logger.warning(f"the profile can't be written: {error}")
                return
        logger.info(f"profile of steps {first} to {self._noted[0]}: {self._table}; {self._trace} for ui.perfetto.dev")

    def _now(self) -> float:
        return time.time() - self.started


def _begin(name: str) -> Any:
    """A name in the trace that begins now."""
    return record_function(name).__enter__()


def named(copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, with a name in the trace."""

    def copy_with_name(tensors: Any) -> Any:
        with record_function(COPY):
            return copy(tensors)

    return copy_with_name


def table(averages: Any) -> str:
    """The costliest operations by their own time on the device, or on the host where there is no other."""
    on_device = any(each.self_device_time_total > 0 for each in averages)
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    text: str = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=WIDEST)
    return text + "\n"
