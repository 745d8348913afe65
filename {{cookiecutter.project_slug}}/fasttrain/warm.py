"""Reads a packed store into the page cache, in a thread beside the training, where memory has room for it."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

import psutil
from loguru import logger

from fasttrain import host, packed
from fasttrain.folder import printable

BLOCK = 8 << 20  # bytes at a time
TO_END = 5.0  # seconds that the thread gets to end: a disk or server that is stuck must not hold up the end
RESERVE = 0.1  # of all memory, left to the training itself


class Warming:
    """``with Warming(path):`` begins to read, and stops with the block. Says in one line what it does, or why not.

    Args:
        path: data.path.
        wanted: data.warm; where it is off nothing happens.
        local_rank: of this process; the first of each machine does it for all.
    """

    def __init__(self, path: str, wanted: bool = True, local_rank: int = 0) -> None:
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if not wanted or local_rank > 0:
            return
        reason = why_not(path)
        if reason is not None:
            logger.warning("data.warm: {}", reason)
            return
        file = os.path.join(path, packed.FILE)
        logger.info("data.warm: reading {} into memory ({:,.0f} MB)", printable(file), os.path.getsize(file) / 1e6)
        self._thread = threading.Thread(target=self._read, args=(file,), name="warm", daemon=True)
        self._thread.start()

    def __enter__(self) -> Warming:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.wait(TO_END)

    def wait(self, seconds: float | None = None) -> None:
        """Until all of it is read, or so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _read(self, path: str) -> None:
        """One pass from beginning to end. Reading lets go of the interpreter, so that the training goes on."""
        began, done, block = time.monotonic(), 0, bytearray(BLOCK)
        try:
            with open(path, "rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # reads further ahead
                while not self._stop.is_set() and (count := file.readinto(block)):
                    done += count
        except OSError as error:
            logger.warning("data.warm: {} can't be read: {}", printable(path), error.strerror)
            return
        seconds = time.monotonic() - began
        stopped = " (stopped before its end)" if self._stop.is_set() else ""
        logger.info("data.warm: {:,.0f} MB read in {:.1f} s{}", done / 1e6, seconds, stopped)


def why_not(path: str) -> str | None:
    """Why this data set is not read into memory; None if it is."""
    if not packed.is_store(path):
        return f"{printable(path)} is no packed store, so it stays on disk; `python -m fasttrain pack` makes one"
    size, left = os.path.getsize(os.path.join(path, packed.FILE)), room()
    if size <= left:
        return None
    return (
        f"{printable(path)} has {size / 1e6:,.0f} MB and only {left / 1e6:,.0f} MB of memory are to spare: it is read "
        "from disk as it is needed"
    )


def room() -> int:
    """Bytes that the page cache may take: what the container and the machine have left, less a reserve."""
    used, total = host.memory()
    left = min(total - used, int(psutil.virtual_memory().available))
    return max(0, left - int(RESERVE * total))
