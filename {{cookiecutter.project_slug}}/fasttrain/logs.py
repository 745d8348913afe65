"""Logging: loguru in front, a queue behind it, so that a slow console or disk never holds up the training.

    with logs.start(directory, rank, "INFO") as log:
        logger.info("...")              # from loguru import logger

One file a rank (``rank0.log`` in the run directory), one console (rank 0; other ranks print only what ends them).
Standard logging, warnings and uncaught exceptions go the same way. Leaving the block drains the queue, whatever made
it end.
"""

from __future__ import annotations

import atexit
import functools
import logging
import logging.handlers
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loguru import logger

from fasttrain.errors import UserError
from fasttrain.sinks import ConsoleSink, FileSink, LineConsole, Listener, last_resort

if TYPE_CHECKING:
    from loguru import Message

console = LineConsole()  # shared with the dashboard: what is printed on it appears above the live panel
_sink_id = 0  # loguru's one sink that is ours; 0 is the one it starts with
TOLD = "_told"  # on an exception: the line that is told of it
_MARK = "_in_log"  # on an exception that has been reported


def start(directory: Path, rank: int, level: str, *, handlers: Sequence[logging.Handler] | None = None) -> Log:
    """Starts logging in this process.

    Args:
        directory: the run directory; made if it isn't there.
        rank: this process' rank.
        level: the least level written, for the file and the console: DEBUG, INFO, WARNING or ERROR.
        handlers: further handlers to stand behind the queue.

    Raises:
        UserError: the log file can't be written.
    """
    path = directory / f"rank{rank}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = FileSink(path, f"rank {rank}")
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror or error}; choose another run.dir") from error
    screen = ConsoleSink(console, f"rank {rank}" if rank else "")
    if rank:
        screen.setLevel(logging.CRITICAL)
    return Log(path, rank, level, [file, screen, *(handlers or ())])


def early(level: str) -> None:
    """Before `start`, which needs the run directory: lines on the console, in the form they will have."""
    screen = ConsoleSink(console)
    _use_sink(lambda message: screen.handle(_to_record(message)), level)


def mark_reported(error: BaseException) -> None:
    """Nothing more is to be said of this exception."""
    setattr(error, _MARK, True)


def reported(error: BaseException) -> bool:
    """Whether this exception already stands in the log (and on the console)."""
    return bool(getattr(error, _MARK, False))


class Log:
    """Running logging of one process: what `start` returns. A context manager; `close` may be called more than once."""

    def __init__(self, path: Path, rank: int, level: str, sinks: Sequence[logging.Handler]) -> None:
        self.path = path
        self._rank, self._level, self._sinks = rank, level, sinks
        self._pid = os.getpid()
        self._closed = False
        source: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queue = _ToQueue(source)
        self._listener = Listener(source, sinks)
        self._hooks = _Hooks(level)
        self._excepthook = sys.excepthook
        sys.excepthook = self._uncaught
        _use_sink(self._put, level)
        self._listener.start()
        atexit.register(self.close)

    def worker_log(self) -> WorkerLog:
        """What a loader worker needs to log to this rank's file; can be pickled."""
        return WorkerLog(str(self.path), self._level, self._rank)

    def report(self, error: BaseException) -> None:
        """Writes the exception that ends this process: a `UserError` as one line, others with their traceback. Once."""
        if reported(error):
            return
        mark_reported(error)
        if isinstance(error, UserError):
            logger.bind(only=getattr(error, "only", None)).critical(str(error))
        elif isinstance(error, SystemExit):
            if error.code not in (None, 0):
                logger.bind(only="file").opt(exception=error).warning(f"exits with {error.code}")
        elif isinstance(error, KeyboardInterrupt):
            logger.bind(only="console").critical("interrupted")
            logger.bind(only="file").opt(exception=error).critical("interrupted")
        else:
            logger.opt(exception=error).critical(getattr(error, TOLD, f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        """Writes all that was logged, then stops and puts back what `start` replaced.

        Each part can be repeated: where a signal breaks in, it runs again at the interpreter's exit.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._hooks.restore()
        sys.excepthook = self._excepthook
        _use_sink(sys.stderr, "WARNING")
        self._listener.drain()
        for sink in self._sinks:
            sink.close()
        self._closed = True
        atexit.unregister(self.close)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.report(error)
        self.close()
        if error is not None:  # the interpreter would print it a second time
            sys.excepthook = functools.partial(_unless_reported, self._excepthook)

    def _put(self, message: Message) -> None:
        if os.getpid() == self._pid:
            self._queue.emit(_to_record(message))  # not handle(): its lock isn't needed, and a signal could strand it
        else:  # a forked process: the queue's thread stayed behind
            self._listener.give(self._sinks[0], _to_record(message))

    def _uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self.report(error)
        if self._excepthook is not sys.__excepthook__:
            self._excepthook(kind, error, traceback)


@dataclass(frozen=True)
class WorkerLog:
    """Logging of a loader worker, a process of its own: it appends to its rank's file, line by line."""

    path: str
    level: str
    rank: int

    def start(self, worker_id: int) -> None:
        """Call first thing in the worker, however it was started. An unwritable file is said on stderr, not raised."""
        who = f"rank {self.rank} worker {worker_id}"
        try:
            sink = FileSink(Path(self.path), who)
        except OSError as error:
            last_resort(f"{who}: can't write {self.path}: {error.strerror or error}")
            return
        lines = Listener(queue.SimpleQueue(), [sink])  # never started: written from here, without a thread
        _Hooks(self.level)
        _use_sink(lambda message: lines.handle(_to_record(message)), self.level)


def _plain_streams() -> None:
    """In a forked process: prints must neither redraw the parent's live panel nor wait for its lock."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_plain_streams)


class _ToQueue(logging.handlers.QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # already text only; the standard one would copy and format it on the training thread


def _to_record(message: Message) -> logging.LogRecord:
    source = message.record
    record = logging.LogRecord(source["name"] or "", source["level"].no, "", 0, str(message).rstrip("\n"), (), None)
    record.levelname = source["level"].name
    record.__dict__["only"] = source["extra"].get("only")  # "file" or "console": for that sink alone
    return record


def _use_sink(sink: Any, level: str) -> None:
    """Puts a sink in the place of the one that is ours; those that the owner added stay."""
    global _sink_id
    try:
        logger.remove(_sink_id)
    except ValueError:  # the owner removed it; nothing to take away
        _sink_id = -1
    _sink_id = logger.add(sink, format="{message}", level=level, backtrace=False, diagnose=False, colorize=False)


def _unless_reported(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not reported(error):
        hook(kind, error, traceback)


class _Intercept(logging.Handler):
    """Passes records of standard logging on to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage().rstrip("\n")
        except Exception:  # arguments that don't fit the text: standard logging's own report, on stderr
            self.handleError(record)
            return
        level: str | int = record.levelname
        try:
            logger.level(record.levelname)
        except ValueError:  # a level of the sender's own
            level = record.levelno
        source = "" if record.name in ("root", "py.warnings") else f"{record.name}: "
        logger.opt(exception=record.exc_info).log(level, source + text)


_INTERCEPT = _Intercept()  # one: a forked worker finds it in place, and adding it again changes nothing


class _Hooks:
    """Routes standard logging, warnings and threads' uncaught exceptions into loguru, until `restore`."""

    def __init__(self, level: str) -> None:
        self._root_level = logging.root.level
        self._replaced: list[tuple[logging.Logger, list[logging.Handler]]] = []
        loggers = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
        for item in (*loggers, logging.root):  # torch's loggers print to stderr on their own and pass nothing on
            own = [handler for handler in item.handlers if _writes_stderr(handler)]
            if own:
                self._replaced.append((item, own))
                for handler in own:
                    item.removeHandler(handler)
                if not item.propagate:
                    item.addHandler(_INTERCEPT)
        logging.root.addHandler(_INTERCEPT)
        logging.root.setLevel(level)
        before = warnings.showwarning
        logging.captureWarnings(True)
        self._captured = warnings.showwarning is not before
        self._threads = threading.excepthook
        threading.excepthook = _uncaught_in_thread

    def restore(self) -> None:
        threading.excepthook = self._threads
        if self._captured:
            logging.captureWarnings(False)
        logging.root.setLevel(self._root_level)
        logging.root.removeHandler(_INTERCEPT)
        while self._replaced:
            item, own = self._replaced.pop()
            item.removeHandler(_INTERCEPT)
            for handler in own:
                item.addHandler(handler)


def _writes_stderr(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stderr, sys.__stderr__)


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "a thread"
    error = args.exc_value or args.exc_type()
    logger.opt(exception=(args.exc_type, error, args.exc_traceback)).error(f"{name} ended with an uncaught exception")
