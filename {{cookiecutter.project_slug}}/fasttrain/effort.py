"""What a batch cost the process that made it: time on a core, in the queue for one, asleep; and its slowest sample."""

from __future__ import annotations

import os
import threading
import time
from statistics import median
from typing import NamedTuple

import psutil

SLOW = 4.0  # times the median sample of its batch: from there on a sample is a hiccup
USAGE_EVERY = 1.0  # seconds between two looks at memory and files


class Effort(NamedTuple):
    """Seconds. What of ``seconds`` was neither on a core nor queued for one was asleep: the disk, a lock, a network."""

    seconds: float
    cpu: float
    # Ready to run while other threads had the cores; None where the system doesn't say (Linux does).
    queued: float | None
    assembly: float  # all but the data set's own work: putting the samples together
    slowest: float  # sample
    tail: float  # spent in samples that took over `SLOW` times the median one


class Usage(NamedTuple):
    """What a loader worker holds."""

    worker: int
    pid: int
    private: int | None  # bytes of memory that it shares with nobody
    open_files: int | None


class QueueTime:
    """Seconds that one thread was ready to run and had no core, since it began. Costs half a microsecond a look."""

    def __init__(self, thread: int | None = None) -> None:
        self._of = (os.getpid(), threading.get_native_id() if thread is None else thread)
        try:
            self._file = os.open(f"/proc/self/task/{self._of[1]}/schedstat", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:  # not Linux
            self._file = -1

    def __call__(self) -> float | None:
        if self._file < 0:
            return None
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the thread has ended; a kernel without these figures
            return None

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def fits(self) -> bool:
        """False in another process or thread than it was made for: the number would be that one's."""
        return self._of == (os.getpid(), threading.get_native_id())


_queues = threading.local()


def _queued() -> float | None:
    found: QueueTime | None = getattr(_queues, "here", None)
    if found is None or not found.fits():
        found = _queues.here = QueueTime()
    return found()


class Meter:
    """Measures the making of one batch.

    Args:
        alone: this process does nothing else (a loader worker), so that the threads of its data set count too.
    """

    def __init__(self, alone: bool) -> None:
        self._clock = time.process_time if alone else time.thread_time
        self._samples: list[float] = []
        self._queued, self._cpu, self._began = _queued(), self._clock(), time.perf_counter()

    def sample(self, seconds: float) -> None:
        """One sample of the data set took this long."""
        self._samples.append(seconds)

    def stop(self) -> Effort:
        seconds, cpu, queued = time.perf_counter() - self._began, self._clock() - self._cpu, _queued()
        samples = self._samples or [0.0]
        slow = SLOW * median(samples)
        return Effort(
            seconds,
            cpu,
            None if queued is None or self._queued is None else queued - self._queued,
            seconds - sum(samples),
            max(samples),
            sum(each for each in samples if each > slow),
        )


class UsageClock:
    """Says now and then what this worker holds."""

    def __init__(self) -> None:
        self._pid, self._next = -1, 0.0

    def due(self, worker: int) -> Usage | None:
        now = time.monotonic()
        if os.getpid() == self._pid and now < self._next:
            return None
        self._pid, self._next = os.getpid(), now + USAGE_EVERY
        process = psutil.Process()
        return Usage(worker, self._pid, private_memory(process), open_files(process))


def private_memory(process: psutil.Process) -> int | None:
    """Bytes in memory that belong to this process alone; slots, databases and libraries that are mapped don't count."""
    try:
        memory = process.memory_info()
    except psutil.Error:
        return None
    return int(memory.rss - getattr(memory, "shared", 0))


def open_files(process: psutil.Process) -> int | None:
    """Handles of files, sockets and pipes."""
    try:
        return int(process.num_handles() if os.name == "nt" else process.num_fds())
    except (psutil.Error, OSError):
        return None
