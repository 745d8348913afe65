"""One training a run directory: a lock on it, which ends with the process that holds it, however that ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loguru import logger

from fasttrain.errors import SettingsError, as_typed

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
WAIT = 20.0  # seconds; a killed launcher's processes are gone by then (watchdog.GRACE), and the next start gets on
EVERY = 0.2  # seconds between two tries


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the run directory in this block. The file stays: who waits for it may have it open.

    Not `flock`: loader workers would inherit it, and hold it on when this process is killed.

    Raises:
        SettingsError: another process trains there, and still does after `WAIT` seconds.
    """
    file: int | None = None
    try:
        file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        logger.warning(f"{folder}: not locked against a second training ({error.strerror})")
    try:
        if file is not None:
            _take(file, folder)
        yield
    finally:
        if file is not None:
            os.close(file)


def _take(file: int, folder: Path) -> None:
    until, waits = time.monotonic() + WAIT, False
    while fcntl is not None:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            other = _signed(folder)
            if time.monotonic() >= until:
                expected = f"a folder of its own: another training is under way in this one ({other})"
                raise SettingsError("run.dir", folder, expected) from None
            if not waits:
                waits = True
                logger.info(f"{folder}: another training is under way there ({other}); {WAIT:g} s for it to end")
            time.sleep(EVERY)
        except OSError as error:  # a file system without locks
            logger.debug(f"{folder}: not locked against a second training ({error.strerror})")
            return
        else:
            break
    _sign(file, f"process {os.getpid()} on {socket.gethostname()}\n")


def _signed(folder: Path) -> str:
    try:
        return as_typed((folder / FILE).read_text(encoding="utf-8", errors="replace").strip(), 200)
    except OSError as error:
        return f"which one can't be read: {error.strerror}"


def _sign(file: int, text: str) -> None:
    try:
        os.ftruncate(file, 0)
        os.write(file, text.encode())
    except OSError as error:  # a full disk: the lock holds without its name
        logger.debug(f"the lock of the run directory can't be signed ({error.strerror})")
