"""Where the training thread stands: another thread looks at it twenty times a second.

A look costs the training nothing but the moment in which the interpreter changes threads. It names the line at which
time goes that no mark explains: a log handler that waits for its disk, a checkpoint that someone added, a print.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType

from fasttrain.effort import QueueTime

EVERY = 0.05  # seconds between two looks
TOLD_EVERY = 1.0  # seconds that an event sums up
MOST_PLACES = 12  # in one event, the most frequent
DEEPEST = 80  # frames looked at

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
# What a frame's file says about what is being done: the first that fits, from the innermost frame outwards.
_KINDS = (
    ("logging", (f"{os.sep}logging{os.sep}", f"{os.sep}loguru{os.sep}", f"{os.sep}rich{os.sep}", f"{_HERE}sinks.py")),
    ("saving", (f"torch{os.sep}serialization.py", f"{os.sep}pickle.py", f"{_HERE}checkpoint.py")),
)
_WRITES = ("print(", ".write(", ".writelines(", ".flush(", "fsync(", "logger.", "logging.", "log.", ".info(")

Place = tuple[str, str, str, str]  # phase, the owner's line, what is done there, the innermost place


class Looks:
    """Looks at the thread that made it; sends one event ``looks`` a second. A context manager.

    Args:
        event: takes it (records.Recorder.event).
        doing: the phase that runs now (watch.Watch.doing).
    """

    def __init__(self, event: Callable[..., None], doing: Callable[[], str]) -> None:
        self._event, self._doing = event, doing
        self._ident = threading.get_ident()
        self._queue_time = QueueTime(threading.get_native_id())
        self._places: Counter[Place] = Counter()
        self._texts: dict[tuple[str, int], str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looks", daemon=True)

    def start(self) -> Looks:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def __enter__(self) -> Looks:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        began, used = time.monotonic(), self._used()
        while not self._stop.wait(EVERY):
            self._look()
            now = time.monotonic()
            if now - began >= TOLD_EVERY:
                after = self._used()
                self._tell(now - began, _minus(after[0], used[0]), _minus(after[1], used[1]))
                began, used = now, after

    def _look(self) -> None:
        frame = sys._current_frames().get(self._ident)
        if frame is not None:
            self._places[place(frame, self._doing(), self._texts)] += 1

    def _tell(self, seconds: float, cpu: float | None, queued: float | None) -> None:
        places = [[*where, count] for where, count in self._places.most_common(MOST_PLACES)]
        self._event("looks", looks=sum(self._places.values()), seconds=seconds, cpu=cpu, queued=queued, at=places)
        self._places.clear()

    def _used(self) -> tuple[float | None, float | None]:
        """Seconds on a core and in the queue for one, of the thread that is looked at."""
        return _cpu(self._ident), self._queue_time()


def place(frame: FrameType | None, doing: str, texts: dict[tuple[str, int], str]) -> Place:
    """Phase, the owner's innermost line with its text, logging, saving or nothing, and the innermost line of all."""
    assert frame is not None
    innermost = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
    kind, own, depth = "", "", 0
    here: FrameType | None = frame
    while here is not None and depth < DEEPEST:
        file = here.f_code.co_filename
        if not kind and (kind := next((name for name, marks in _KINDS if any(mark in file for mark in marks)), "")):
            own = ""  # a handler of the owner's: the line that logs is wanted
        if not own and _is_owners(file):
            text = texts.setdefault((file, here.f_lineno), linecache.getline(file, here.f_lineno).strip()[:120])
            own = f"{_short(file)}:{here.f_lineno} {here.f_code.co_name}: {text}"
            if not kind and here is frame and any(word in text for word in _WRITES):
                kind = "logging"
        here, depth = here.f_back, depth + 1
    return doing, own, kind, innermost


def _is_owners(file: str) -> bool:
    """Code of the project's owner: neither of this package nor of a library."""
    return not (file.startswith((_HERE, "<", *_LIBRARIES)) or f"{os.sep}site-packages{os.sep}" in file)


_LIBRARIES = tuple({os.path.dirname(os.path.abspath(module.__file__ or "?")) + os.sep for module in (os, threading)})


def _short(file: str) -> str:
    return (
        os.sep.join(file.split(os.sep)[-2:])
        if "site-packages" in file or file.startswith(_LIBRARIES)
        else os.path.basename(file)
    )


def _cpu(thread: int) -> float | None:
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    except (AttributeError, OSError):  # not a POSIX system; the thread has ended
        return None


def _minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
