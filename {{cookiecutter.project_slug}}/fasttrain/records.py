"""What a training leaves behind about itself: one record a batch, and events, as JSON lines in the run directory.

The training thread only appends to a queue; a background thread writes the files and feeds the views (dashboard,
TensorBoard) four times a second.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from loguru import logger

from fasttrain.errors import UserError
from fasttrain.sinks import LineFile

PHASES = ("wait", "copy", "forward", "backward", "optimizer", "other")
EVERY = 0.25  # seconds between two looks at the queue
CAP = 200_000  # records waiting for a blocked disk, about 100 MB; further ones are counted and dropped
PATIENCE = 10.0  # seconds that close() waits for a blocked disk


class BatchRecord(NamedTuple):
    """One batch on one rank. Times in seconds; `wall` is the sum of the six phases."""

    epoch: int
    step: int  # the optimizer step it belongs to
    time: float  # at the batch's end, since the run began
    wall: float
    wait: float
    copy: float
    forward: float
    backward: float
    optimizer: float
    other: float
    images: int  # this rank's samples
    loss: Any = None  # number, or a 0-d tensor on the host, read in the background
    lr: float | None = None
    made: float | None = None  # seconds the loader worker took for this batch
    worker: int | None = None
    ready: int | None = None  # batches ready in the loader when this one was asked for
    host_wall: float | None = None  # on a device with a queue of its own: the same batch on the host's clock
    host_wait: float | None = None  # and how long the host waited for the loader
    behind: int | None = None  # batches before this one that the device had not ended when the host was through with it
    backward_cpu: float | None = None  # on a CPU: seconds of the backward phase in which this thread ran
    made_cpu: float | None = None  # of `made`: seconds on a core
    made_queued: float | None = None  # ready to run, without a core
    assembly: float | None = None  # putting the samples together
    slowest: float | None = None  # sample
    tail: float | None = None  # in samples that took several times the batch's median one


_LOSS = BatchRecord._fields.index("loss")


class View(Protocol):
    """Something that shows records. All is called from the recorder's thread; one that raises is dropped."""

    def batches(self, records: list[BatchRecord]) -> None:
        """The batches since the last call, losses as floats."""

    def event(self, event: dict[str, Any]) -> None:
        """One event: ``time``, ``event`` and its fields."""

    def draw(self, now: float) -> None:
        """Called about four times a second; `now` is `time.monotonic`."""

    def close(self) -> None:
        """The run is over."""


def no_listener(kind: str, /, **fields: Any) -> None:
    """Takes events in place of `Recorder.event` where nobody wants them."""


class Recorder:
    """Writes ``rank<r>.jsonl`` and ``events<r>.jsonl`` and feeds the views. A context manager.

    A full or blocked disk never stops the training: what is lost is counted, and said once when it begins and again
    at the end.

    Args:
        directory: the run directory.
        rank: this process' rank.
        started: `time.time` when the run began.
        views: what to show the records on.

    Raises:
        UserError: the files can't be opened.
    """

    def __init__(self, directory: Path, rank: int, started: float, views: Sequence[View] = ()) -> None:
        try:
            self._files = [LineFile(directory / f"{name}{rank}.jsonl") for name in ("rank", "events")]
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"can't write records in {directory}: {reason}; choose another run.dir") from error
        self._started = started
        self._views = list(views)
        self._pending: deque[BatchRecord] = deque()
        self._events: deque[dict[str, Any]] = deque()
        self._overflow = 0
        self._unwritten = 0
        self._warned: set[str] = set()
        self._pid = os.getpid()
        self._closed = False
        self._stop, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def batch(self, record: BatchRecord) -> None:
        """Takes one batch. Costs about 0.1 us: no lock, no formatting, no file."""
        if len(self._pending) < CAP:
            self._pending.append(record)
        else:
            self._drop()

    def event(self, kind: str, /, **fields: Any) -> None:
        """Takes one event, from any thread. Values that JSON has no form for become numbers or text."""
        if len(self._events) < CAP:
            self._events.append({"time": round(time.time() - self._started, 6), "event": kind, **fields})
        else:
            self._drop()

    def show_on(self, view: View) -> None:
        """Adds a view, from any thread; it sees what comes from now on."""
        self._views.append(view)

    @property
    def lost(self) -> int:
        """Records and events that are not in the files: the queue was full, or the disk was."""
        return self._overflow + self._unwritten

    def close(self) -> None:
        """Writes what is left and closes the views; waits at most `PATIENCE` seconds for a blocked disk."""
        if self._closed or os.getpid() != self._pid:
            return
        self._stop.set()
        blocked = not self._ended.wait(PATIENCE)
        if blocked:
            self._close_views()  # the terminal gets its cursor back
        else:
            for file in self._files:
                file.close()
        self._unwritten += len(self._pending) + len(self._events)
        self._closed = True
        atexit.unregister(self.close)
        if self.lost or blocked:
            reason = "the disk is blocked" if blocked else self._reason()
            more = "at least " if blocked else ""
            logger.warning(f"{more}{self.lost} records are missing in {self._files[0].path.parent}: {reason}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(EVERY):
                self._drain()
            self._drain()
        finally:
            self._close_views()
            self._ended.set()

    def _drain(self) -> None:
        records = [self._with_number(self._pending.popleft()) for _ in range(len(self._pending))]
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._show("batches", records)
        for event in events:
            self._show("event", event)
        self._write(self._files[0], [record_line(record) for record in records])
        self._write(self._files[1], [_line(event) for event in events])
        self._show("draw", time.monotonic())

    def _drop(self) -> None:
        self._overflow += 1  # said from here, since the recorder's thread is the one that is stuck
        self._warn("overflow", f"{CAP} records wait for the disk; training goes on, further ones are dropped")

    def _with_number(self, record: BatchRecord) -> BatchRecord:
        if record.loss is None or isinstance(record.loss, float):
            return record
        try:
            return BatchRecord._make((*record[:_LOSS], float(record.loss), *record[_LOSS + 1 :]))
        except Exception as error:  # a loss that isn't one number; the other fields of the record are still good
            self._warn("loss", f"the loss of step {record.step} is not one number ({error}); it is left out")
            return record._replace(loss=None)

    def _write(self, file: LineFile, lines: list[str]) -> None:
        lost = file.write(lines) if lines else 0
        if lost:
            self._unwritten += lost
            self._warn("write", f"can't write {file.path} ({file.error}); training goes on without these records")

    def _reason(self) -> str:
        errors = [file.error for file in self._files if file.error]
        return str(errors[0]) if errors else f"more than {CAP} were waiting for the disk"

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning(text)

    def _show(self, method: str, argument: Any) -> None:
        if argument == []:
            return
        for view in tuple(self._views):
            try:
                getattr(view, method)(argument)
            except Exception as error:  # a display must not cost the records, nor the training
                self._views.remove(view)
                self._dropped(view, error)

    def _close_views(self) -> None:
        while self._views:
            view = self._views.pop()
            try:
                view.close()
            except Exception as error:  # as above; the others still have to be closed
                self._dropped(view, error)

    @staticmethod
    def _dropped(view: View, error: Exception) -> None:
        logger.opt(exception=error).warning(f"{type(view).__name__} failed and is not shown any more: {error}")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=lambda value: _plain(value)).encode


def _plain(value: Any) -> Any:
    """A form for JSON of what has none: arrays and tensors of one number become that number, the rest text."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
    return number if math.isfinite(number) else str(number)


def record_line(record: BatchRecord) -> str:
    """One JSON line: times to 0.1 us, what is None left out.

    Written by one % on a template, at less than half of what the JSON encoder takes: while the recorder's thread
    formats, a training that launches small kernels waits for the interpreter.
    """
    values = tuple([value for value in record if value is not None])
    if not math.isfinite(sum(values)):
        return _line({name: value for name, value in record._asdict().items() if value is not None})
    return _template(tuple([value is not None for value in record])) % values


@functools.cache
def _template(known: tuple[bool, ...]) -> str:
    """For the records in which these fields are known."""
    fields = [name for name, is_known in zip(BatchRecord._fields, known, strict=True) if is_known]
    return "{" + ",".join(f'"{name}":{_FORMS.get(name) or _form(name)}' for name in fields) + "}\n"


_FORMS = {"loss": "%.9g", "lr": "%.9g"}  # as many digits as a float32 has


def _form(name: str) -> str:
    return "%d" if "int" in str(BatchRecord.__annotations__[name]) else "%.7f"


def _line(fields: dict[str, Any]) -> str:
    """One JSON line; a number that is not finite becomes null, with its name and ``_text`` beside it."""
    try:
        return _encode(fields) + "\n"
    except ValueError:  # NaN or infinity
        plain: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                plain[name], plain[f"{name}_text"] = None, str(value)
            elif isinstance(value, (list, tuple, dict)):
                plain[name] = str(value) if "nan" in str(value) or "inf" in str(value) else value
            else:
                plain[name] = value
        return _encode(plain) + "\n"
