"""Where lines end up: a file that is appended to in whole lines, the console, and the thread that feeds them."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: they could move the cursor
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


def escaped(text: str) -> str:
    """The text with its control characters written out (``\\x1b``); tabs and newlines stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", text)


def last_resort(text: str) -> None:
    """Says a line on the process' own stderr: for when the sinks themselves fail."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed or missing: there is nowhere left to say it
        print(text, file=sys.__stderr__, flush=True)


class LineFile:
    """A text file that is appended to, in whole lines and without a buffer.

    Each `write` is one system call where the disk allows it, so that processes may share a file and a killed one leaves
    at most its last line unfinished. The next writer finds that and starts on a new line.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None  # why lines were lost last
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        self._torn = False
        if size := os.fstat(self._fd).st_size:
            os.lseek(self._fd, size - 1, os.SEEK_SET)
            self._torn = os.read(self._fd, 1) != b"\n"

    def write(self, lines: Sequence[str]) -> int:
        """Appends lines, each ending in a newline. Returns how many were lost (full disk), 0 if all is well."""
        data = memoryview((b"\n" if self._torn else b"") + "".join(lines).encode("utf-8", "backslashreplace"))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            self.error = error
        if done:
            self._torn = data[done - 1] != ord("\n")
        return bytes(data[done:]).count(b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LineConsole(Console):
    """A rich console on stderr that prints text as it is, and on which a closed pipe is an error like any other."""

    def __init__(self) -> None:
        super().__init__(stderr=True, markup=False, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:  # rich ends the process here, which from a background thread would hide the loss
        raise BrokenPipeError("stderr was closed")


class FileSink(logging.Handler):
    """Appends log records to a `LineFile`; `who` stands in each line (``rank 0 worker 2``)."""

    def __init__(self, path: Path, who: str) -> None:
        super().__init__()
        self.set_name(str(path))
        self.addFilter(lambda record: getattr(record, "only", None) != "console")
        self._file = LineFile(path)
        self._who = who

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d} {record.levelname:<8} {self._who} | "
        if self._file.write([head + escaped(record.getMessage()) + "\n"]):
            raise self._file.error or OSError("not written")

    def close(self) -> None:
        self._file.close()
        super().close()


class ConsoleSink(logging.Handler):
    """Prints log records on the console, above a live panel if there is one; `who` stands before each line if given."""

    def __init__(self, console: Console, who: str = "") -> None:
        super().__init__()
        self.set_name("the console")
        self.addFilter(lambda record: getattr(record, "only", None) != "file")
        self._console = console
        self._who = f"{who} | " if who else ""

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = max((number for number in _STYLES if number <= record.levelno), default=0)
        body = escaped(record.getMessage()).replace("\n", f"\n{self._who}")
        text = Text.assemble(
            self._who, (stamp, "dim"), " ", (f"{record.levelname:<8}", _STYLES.get(level, "")), " ", body
        )
        self._console.print(text, soft_wrap=True)


class Listener(logging.handlers.QueueListener):
    """The thread behind the queue. A sink that fails loses its lines, never the others' and never the thread."""

    def __init__(self, source: queue.SimpleQueue[Any], sinks: Sequence[logging.Handler]) -> None:
        super().__init__(source, *sinks, respect_handler_level=True)
        self._handled = 0  # records; tells a slow sink from one that hangs
        self._lost: dict[logging.Handler, tuple[int, Exception]] = {}

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        if isinstance(record, threading.Event):  # from drain: all before it is written
            record.set()
            return
        for sink in self.handlers:
            if record.levelno >= sink.level:
                self.give(sink, record)
        self._handled += 1

    def drain(self, patience: float = 30.0) -> None:
        """Returns once all that was put in before is handled; gives up after `patience` seconds without progress.

        A signal's exception (Ctrl-C, a terminated launcher) waits until the lines are written, and is then raised.
        """
        if self._thread is None:
            return
        # Not the thread's join: Python 3.11 takes a thread for ended once a signal broke in.
        drained = threading.Event()
        self.queue.put_nowait(drained)
        interruption: BaseException | None = None
        before, since = self._handled, time.monotonic()
        while True:
            try:
                if drained.wait(0.5):
                    self._report_lost()
                    break
                if self._handled != before:
                    before, since = self._handled, time.monotonic()
                elif time.monotonic() - since > patience:
                    last_resort(f"log: a sink has hung for {patience:g} s; the lines still waiting are lost")
                    break
            except (KeyboardInterrupt, SystemExit) as error:
                interruption = error
        self.enqueue_sentinel()
        self._thread = None
        if interruption is not None:
            raise interruption

    def _report_lost(self) -> None:
        for sink, (count, error) in self._lost.items():
            self._tell(f"{count} log records could not be written to {sink.get_name()} ({error})", but=sink)

    def give(self, sink: logging.Handler, record: logging.LogRecord) -> None:
        """Hands one record to one sink; counts what the sink can't take, and says so once on the others."""
        try:
            sink.handle(record)
        except Exception as error:  # whatever a sink raises, a training does not end for want of a log line
            count = self._lost[sink][0] if sink in self._lost else 0
            self._lost[sink] = (count + 1, error)
            if count == 0:
                self._tell(f"can't write to {sink.get_name()} ({error}); training goes on without it", but=sink)

    def _tell(self, text: str, but: logging.Handler) -> None:
        others = [sink for sink in self.handlers if sink is not but and sink.level <= logging.WARNING]
        if not others:
            last_resort(f"log: {text}")
        for sink in others:
            self.give(sink, logging.LogRecord("fasttrain", logging.WARNING, "", 0, text, (), None))
