"""Work spread over processes in a fixed order, and how far it has come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fasttrain.errors import UserError

T = TypeVar("T")
R = TypeVar("R")
AHEAD = 3  # items under way for each process: enough that none waits, few enough that results need little memory
LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


def ordered(function: Callable[[T], R], items: Iterable[T], jobs: int, method: str | None = None) -> Iterator[R]:
    """``function(item)`` for each item by `jobs` processes; results in the order of the items.

    Args:
        function: goes to each process once, with what it holds; one job runs it here.
        method: fork, spawn or forkserver; None is Python's default.

    Raises:
        UserError: a process died. What `function` raises.
    """
    if jobs <= 1:
        _keep_to_one_core()
        yield from map(function, items)
        return
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(function, os.getpid()))
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            if len(waiting) >= AHEAD * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, as when memory runs out: try again with fewer --jobs; --jobs 1 shows a crash itself"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_function: Callable[[Any], Any] | None = None


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    """Runs first in each process."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the first process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _keep_to_one_core()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """After a kill -9 of the first process nothing else would end this one."""
    main = multiprocessing.parent_process()
    while os.getppid() == parent or (main is not None and main.pid != os.getppid() and main.is_alive()):
        time.sleep(0.5)
    os._exit(1)


def _keep_to_one_core() -> None:
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


def _call(item: Any) -> Any:
    assert _function is not None
    return _function(item)


class Steps(AbstractContextManager["Steps"]):
    """Progress on stderr: a bar on a terminal, elsewhere a line now and then.

    Args:
        doing: one word, ``packing``.
        total: images.
        done: of them, before this.
    """

    def __init__(self, doing: str, total: int, done: int = 0) -> None:
        self.doing, self.total, self.done, self.first = doing, total, done, done
        self._began = self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            speed = TextColumn("{task.fields[speed]}")
            self._bar = Progress(*columns, speed, TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task(doing, total=total, completed=done, speed="")

    def __enter__(self) -> Steps:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        speed = f"{(self.done - self.first) / max(now - self._began, 1e-3):,.0f} images/s"
        if self._bar:
            self._bar.update(self._task, completed=self.done, speed=speed)
        elif now - self._said >= LINE_EVERY:
            self._said = now
            share = 100 * self.done // max(self.total, 1)
            sys.stderr.write(f"{self.doing}: {self.done} of {self.total} ({share} %), {speed}\n")
