"""The stopwatch of the loop.

    for batch in watch.batches(feed.train(...)):    # the wait for data is timed in here
        ...
        watch.mark("forward")                       # the time since the last mark was the forward pass

Each moment belongs to exactly one phase of one batch, or to a pause, so the phases add up to the whole time by
construction: a mark that is deleted gives its time to the next one. On a device the marks are events in its queue of
work; they are read batches later, when the device has passed them, and never waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fasttrain.clock import Clock, HostClock, Stamp
from fasttrain.graph import operations
from fasttrain.records import PHASES, BatchRecord
from fasttrain.transfer import Batch

MARKS = frozenset(("forward", "backward", "optimizer", "other"))
NEXT = {
    "wait": "forward",
    "forward": "backward",
    "backward": "optimizer",
    "optimizer": "other",
    "other": "wait",
    "pause": "wait",
}
_NO_EFFORT = (None,) * 5  # the loader worker said nothing of what the batch took
MOST_PENDING = 256  # batches whose events have not passed; more means that nothing ever passes


class Sink(Protocol):
    """Where the records go (records.Recorder)."""

    def batch(self, record: BatchRecord) -> None: ...
    def event(self, kind: str, /, **fields: Any) -> None: ...


class _Timed(NamedTuple):
    """A batch whose end is marked but may not have passed on the device. The batch itself isn't kept: its memory is
    wanted."""

    begin: Stamp
    segments: list[tuple[str, Stamp]]  # phase, and the moment at which it ended; "pause" is left out of the sums
    copied: tuple[Stamp, Stamp] | None
    before: tuple[Any, ...]  # the fields of its record that stand before the times,
    after: tuple[Any, ...]  # and those after them


class Watch:
    """Times batches and sends one BatchRecord each to the sink.

    Args:
        sink: takes the records and events.
        clock: of the device that trains.
        started: when the run began, ``time.time()``; the records' times count from here.
        began: when this process began; later than started in a resumed run.
    """

    def __init__(self, sink: Sink, clock: Clock, started: float, began: float) -> None:
        self.sink, self.clock, self.started, self.began = sink, clock, started, began
        self._begin: Stamp = None  # where the open batch, or the gap before it, began
        self._segments: list[tuple[str, Stamp]] = []
        self._batch: Batch | None = None
        self._noted: tuple[int, torch.Tensor | None, float | None] = (0, None, None)
        self._pending: deque[_Timed] = deque()
        self._runs_behind = not isinstance(clock, HostClock)  # the host's times are then other ones, kept beside
        self._host_end = self._host_wait = 0.0
        self._cpu_at = self._backward_cpu = 0.0
        self.paused: str | None = None
        self._uncounted = 2  # batches until the operations of a step are counted: a first one may be a special one

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """Hand on the batches; the time from asking to getting one is its wait (and copy, where the device copies)."""
        if self._begin is None:
            self._begin, self._host_end = self.clock.stamp(), time.perf_counter()
            self.sink.event("pause", name="startup", seconds=time.time() - self.began)
        else:
            self._segments.append(("other", self.clock.stamp()))  # what happened since the last batch, pauses apart
        iterator = iter(source)
        try:
            while True:
                asked = time.perf_counter()
                if (batch := next(iterator, None)) is None:
                    return
                self._host_wait = time.perf_counter() - asked
                self._segments.append(("wait", self.clock.stamp()))
                self._batch = batch
                yield batch
                self._finish()
        finally:
            self._finish()  # after a break, or an exception, in the loop

    def mark(self, phase: str) -> None:
        """The time since the last mark was spent in this phase: forward, backward, optimizer or other."""
        if phase not in MARKS:
            raise ValueError(f"no phase is called {phase!r}: use one of {', '.join(sorted(MARKS))}")
        self._segments.append((phase, self.clock.stamp()))
        if not self._runs_behind:
            before, self._cpu_at = self._cpu_at, time.thread_time()
            if phase == "backward":
                self._backward_cpu = self._cpu_at - before

    @property
    def doing(self) -> str:
        """The phase that runs now, for who looks from another thread: the one that usually follows the last mark."""
        if self.paused is not None:
            return "pause"
        try:
            last = self._segments[-1][0]
        except IndexError:
            return "wait"
        return NEXT[last]

    def note(self, step: int, loss: torch.Tensor, lr: float) -> None:
        """What else the record of this batch says. The loss stays a tensor: its value is read later, elsewhere."""
        if self._uncounted:
            self._uncounted -= 1
            if not self._uncounted and loss.grad_fn is not None:
                self.sink.event("graph", operations=operations(loss))
        loss = loss.detach()
        if not loss.is_cpu:
            host = torch.empty((), dtype=loss.dtype, pin_memory=loss.is_cuda)
            # On CUDA done before this batch's last event has passed; elsewhere nothing would tell when.
            loss = host.copy_(loss, non_blocking=loss.is_cuda)
        self._noted = (step, loss, lr)

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Stop the clock: the time in here belongs to no batch and is written down as an event."""
        if self._begin is None:  # before the first batch: part of the start-up
            yield
            return
        self.clock.settle()
        self._segments.append(("other", self.clock.stamp()))
        began, self.paused = time.perf_counter(), name
        try:
            yield
        finally:
            self.paused = None
            self.clock.settle()
            self._segments.append(("pause", self.clock.stamp()))
            seconds = time.perf_counter() - began
            self._host_end += seconds
            self.sink.event("pause", name=name, seconds=seconds)

    def close(self) -> None:
        """Read what is pending, at the end of a training. Waits for the device."""
        self._finish()
        self.clock.settle()
        self._send_passed()

    def abandon(self) -> None:
        """Read what the device has passed, when a training fails: it may never pass the rest."""
        with contextlib.suppress(RuntimeError):  # a device in error answers every question with the same error
            self._finish()

    def _finish(self) -> None:
        """The open batch ends now."""
        if self._batch is None:
            return
        end, host_end = self.clock.stamp(), time.perf_counter()
        if self._runs_behind:
            self._send_passed()
        self._segments.append(("other", end))
        step, loss, lr = self._noted
        batch, effort = self._batch, self._batch.effort
        if batch.usage is not None:
            self.sink.event("worker", **batch.usage._asdict())
        # By position and not by name, in the order of BatchRecord: by name it would cost 3 us more, in every step.
        before = (batch.epoch, step, time.time() - self.started)
        if self._runs_behind:
            on_host: tuple[Any, ...] = (host_end - self._host_end, self._host_wait, len(self._pending), None)
        else:
            on_host = (None, None, None, self._backward_cpu)
        made = _NO_EFFORT if effort is None else effort[1:]
        after = (batch.size, loss, lr, batch.made, batch.worker, batch.ready, *on_host, *made)
        self._pending.append(_Timed(self._begin, self._segments, batch.copied, before, after))
        self._begin, self._segments, self._batch, self._noted = end, [], None, (step, None, None)
        self._host_end = host_end
        if len(self._pending) > MOST_PENDING:
            self.clock.settle()
        self._send_passed()

    def _send_passed(self) -> None:
        while self._pending and self.clock.passed(self._pending[0].segments[-1][1]):
            self.sink.batch(self._record(self._pending.popleft()))

    def _record(self, timed: _Timed) -> BatchRecord:
        spent, begin = dict.fromkeys(PHASES, 0.0), timed.begin
        for phase, end in timed.segments:
            if phase != "pause":
                seconds = self.clock.seconds(begin, end)
                if phase == "wait" and timed.copied is not None:
                    copy = self._overlap(begin, end, timed.copied)
                    spent["copy"] += copy
                    seconds -= copy
                spent[phase] += seconds
            begin = end
        return BatchRecord._make((*timed.before, sum(spent.values()), *spent.values(), *timed.after))

    def _overlap(self, begin: Stamp, end: Stamp, copied: tuple[Stamp, Stamp]) -> float:
        """Of the wait from begin to end, the seconds in which this batch was being copied, the device idle."""
        after = max(0.0, self.clock.seconds(begin, copied[0]))
        before = max(0.0, self.clock.seconds(copied[1], end))
        return max(0.0, self.clock.seconds(begin, end) - after - before)
