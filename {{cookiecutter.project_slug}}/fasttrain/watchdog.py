"""A thread that ends this process when the training can't go on: the launcher is gone, or another rank has failed.

Usually the main thread notices by itself, by a signal or a broken connection. This is for when it can't: a launcher
that was killed sends no signal, and a GPU may wait for a lost neighbour for as long as `run.timeout`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import current_process
from types import TracebackType

from loguru import logger

from fasttrain.failures import Failures
from fasttrain.stop import Stop

EVERY = 1.0  # seconds between two looks
GRACE = 15.0  # seconds that the main thread has to end by itself


class Watchdog:
    """Watches from its making on, as a context manager until the block is left.

    Args:
        failures: who failed first.
        stop: what to end the loop by.
        launcher: process number of the launcher; None: there is none to watch.
    """

    def __init__(self, failures: Failures, stop: Stop, launcher: int | None) -> None:
        self.failures, self.stop, self.launcher = failures, stop, launcher
        self.flush: Callable[[], None] = lambda: None  # writes what was logged
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._done.wait(EVERY):
            if self.launcher is not None and os.getppid() != self.launcher:
                text = f"the launcher (process {self.launcher}) is gone, so the training ends"
                self.failures.launcher_is_gone(text)
                logger.error(text)
                self._end(text)
            known = self.failures.known()
            if known is not None and known.rank != self.failures.rank:
                self._end(str(known))

    def _end(self, text: str) -> None:
        self.stop.abort(text)
        if self._done.wait(GRACE):
            return
        logger.error(f"{text}; this process did not end by itself within {GRACE:g} s, and is ended")
        self.flush()
        os._exit(1)


def launcher() -> int | None:
    """The process number of torchrun, if that started this process."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(os, "getppid") else None


def die_with_parent(parent: int) -> None:
    """Have Linux end this process as soon as the one that started it is gone, whatever it does then.

    Args:
        parent: process number of the training process, which may be gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        by_server = "ForkServer" in type(current_process()).__name__  # the server ends soon after the training process
        if os.getppid() != parent and not by_server:
            os._exit(1)
