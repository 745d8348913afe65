"""Failing well: which process failed first and why is known to all the others, and is said once.

The first process that fails puts its cause into the launcher's store, which outlives the processes. The others, whose
connections break a moment later, find it there and say it in place of an error of their own. A process that is killed
leaves no cause: then those that are left find out together who is missing.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from loguru import logger

from fasttrain.errors import UserError
from fasttrain.logs import TOLD

_KEY = "first cause"
PATIENCE = 3.0  # seconds in which the others may say that they, too, lost somebody
TO_END = 30.0  # seconds that a process which has failed may take to end; then it is ended
_OTHERS = re.compile(r"third_party/gloo|gloo/transport|TCPStore|Connection (closed|reset) by peer")
_NCCL = re.compile(r"NCCL|nccl")  # which has errors of its own, too: memory, drivers, two ranks on one device
_NCCL_OTHERS = re.compile(r"remote process exited|ncclRemoteError|abort|[Tt]imed? ?out|by (remote )?peer|Broken pipe")
_TIMED_OUT = re.compile(r"[Tt]imed? ?out")

_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process (\d+)")
_KILLED = 9  # SIGKILL, by a name that Windows has, too
_PLACE = re.compile(r'File "(.+?)", line (\d+), in (\w+)')


class Cause(NamedTuple):
    """What ended the training, and on which rank; None: outside of all."""

    rank: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank} failed first: {self.text}"


class Lost(Enum):
    """What an error tells of the other processes."""

    CONNECTION = "a connection broke"
    ANSWER = "no answer came in time"


class EndedByOther(UserError):
    """This process ends because another failed. It stands in this rank's file; on the console only if `aloud`."""

    def __init__(self, cause: Cause, aloud: bool = False) -> None:
        super().__init__(str(cause))
        self.only = None if aloud else "file"


class Failures:
    """The account of who failed first.

    Args:
        rank: of this process. world: number of processes.
        timeout: seconds after which one process gives up on another (``run.timeout``).
    """

    def __init__(self, rank: int = 0, world: int = 1, timeout: float = math.inf) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.place: Callable[[], str] = lambda: ""  # where the training stands, for the text
        self._store: Any = None
        self._gone: Cause | None = None

    def share(self, store: Any) -> None:
        """From here on the others can be told. store: a ``torch.distributed.Store`` that all ranks use."""
        self._store = store
        store.set(f"process {self.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def launcher_is_gone(self, text: str) -> None:
        """It took its store along: whatever breaks from here on follows from that."""
        self._store, self._gone = None, Cause(None, text)

    def known(self) -> Cause | None:
        """The first cause, if some rank has told it."""
        try:
            if self._store is None or not self._store.check([_KEY]):
                return None
            return Cause(*json.loads(self._store.get(_KEY)))
        except RuntimeError:  # the store is gone, with the launcher
            return None

    def explain(self, error: BaseException, asked: bool = False) -> EndedByOther | None:
        """What to say in place of this error; None: the error itself, which is then the first cause.

        asked: it was asked to stop (a signal), which is no failure unless there was one elsewhere.

        From here on a SIGTERM, with which a launcher ends those that are left, no longer breaks in, and a process that
        failed has `TO_END` seconds to end. One that was asked to end has the time that the stop gives it (stop.py).
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not asked:
            faulthandler.dump_traceback_later(TO_END, exit=True, file=sys.__stderr__ or sys.stderr)
        known = self.known()
        lost = lost_others(error)
        followed = lost is not None or str(error) == str(known)
        if lost is not None:
            logger.bind(only="file").warning(f"{lost.value}: {error}")  # whole: it may tell more than its first line
        if self._gone is not None:
            return EndedByOther(self._gone)
        if known is None and self._store is None:
            setattr(error, TOLD, self._describe(error))
            return None
        if known is None and lost is not None:
            known, aloud = self._find_lost(error, lost)
            return EndedByOther(known, aloud)
        if known is None and asked:
            return None
        if known is None:
            mine = Cause(self.rank, self._describe(error))
            setattr(error, TOLD, f"rank {self.rank}, {mine.text}")
            if (known := self._claim(mine)) == mine:
                return None
        if not followed and not asked:
            shown = None if isinstance(error, UserError) else error
            logger.bind(only="file").opt(exception=shown).critical(self._describe(error))
        return EndedByOther(known)

    def _claim(self, mine: Cause) -> Cause:
        """Tell the cause unless another rank has; the one that stands."""
        try:
            return Cause(*json.loads(self._store.compare_set(_KEY, "", json.dumps(mine))))
        except RuntimeError:
            return mine

    def _describe(self, error: BaseException) -> str:
        """One line: where the training stood, what was raised, and in which line of code if that is to blame."""
        place, text = self.place(), summary(error)
        return text if not place or text.startswith("epoch ") else f"{place}: {text}"  # it says another step itself

    def _find_lost(self, error: BaseException, how: Lost) -> tuple[Cause, bool]:
        """Who is missing, when connections broke and nobody told why; and whether this rank is the one to say it."""
        lost: list[tuple[int, str]] = []
        try:
            self._store.set(f"waits {self.rank}", "1")
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                if (known := self.known()) is not None:
                    return known, False
                silent = [rank for rank in range(self.world) if not self._store.check([f"waits {rank}"])]
                states = [(rank, self._state(rank, how)) for rank in silent]
                lost = [(rank, state) for rank, state in states if state is not None]
                if any(state.startswith("its process") for _, state in lost):
                    break  # seen on this machine
                time.sleep(0.1)
        except RuntimeError:
            return Cause(
                self.rank, f"the launcher's store is gone, and the other processes with it ({_first(error)})"
            ), True
        lost.sort(key=lambda each: not each[1].startswith("its process"))
        mine = Cause(*lost[0]) if lost else Cause(self.rank, f"lost the connection to the others ({_first(error)})")
        known = self._claim(mine)
        return known, known == mine

    def _state(self, rank: int, how: Lost) -> str | None:
        """What is to be seen of a rank that does not answer; None: it runs, and has only not noticed yet."""
        host, number = json.loads(self._store.get(f"process {rank}"))
        if host == socket.gethostname():
            try:
                process = psutil.Process(number)
                if (status := process.status()) == psutil.STATUS_STOPPED:
                    process.resume()  # so that it can end, too
            except psutil.NoSuchProcess:
                status = psutil.STATUS_DEAD
            if status in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE):
                return f"its process {number} {how_it_ended(number)}"
            if status == psutil.STATUS_STOPPED:
                return f"its process {number} was stopped, and did not answer within {self.timeout:g} s (run.timeout)"
        where = f"process {number} on {host}"
        if how is Lost.ANSWER:
            return f"no answer from {where} within {self.timeout:g} s (run.timeout); its log shows what it did last"
        if host == socket.gethostname():
            return None
        return f"the connection to {where} broke; its log or that machine's may tell why"


def how_it_ended(number: int) -> str:
    """How a process ended, as far as Linux still knows it."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
        code = int(stat.rpartition(")")[2].split()[49])
    except (OSError, ValueError, IndexError):
        code = _KILLED
    if code & 0x7F == _KILLED:
        return "was killed, from outside or for want of memory (see dmesg)"
    if code & 0x7F:
        return f"was ended by the signal {signal.Signals(code & 0x7F).name}"
    return f"ended with exit code {code >> 8} and said nothing"


def lost_others(error: BaseException | None) -> Lost | None:
    """What it says of another process, if it only says that one is gone or does not answer; else None."""
    seen = 0
    while error is not None and seen < 10:
        text = str(error)
        if isinstance(error, RuntimeError):  # as all of torch.distributed's are
            if _NCCL.search(text):
                found = _NCCL_OTHERS.search(text) is not None
            else:
                found = isinstance(error, dist.DistError) or _OTHERS.search(text) is not None
            if found:
                return Lost.ANSWER if _TIMED_OUT.search(text) else Lost.CONNECTION
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def summary(error: BaseException) -> str:
    """What was raised, and the line of code that raised it unless the user can mend it by the message alone."""
    if isinstance(error, UserError):
        return str(error)
    text, places = str(error), [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if (worker := _IN_WORKER.match(text)) is not None:  # PyTorch puts the worker's traceback into the message
        places = _PLACE.findall(text)
        said = f"{text.strip().splitlines()[-1][:300]}, in loader worker {worker[1]}"
    else:
        said = f"{type(error).__name__}: {_first(error)}"
    file, line, name = places[-1] if places else ("", 0, "")
    return said + (f" ({Path(file).name}:{line} in {name})" if file else "")


def _first(error: BaseException) -> str:
    """The first line; of NCCL's errors all, since the last ones say what happened, without the C++ frames below."""
    lines = str(error).strip().splitlines()
    if isinstance(error, dist.DistBackendError):
        lines = [" ".join(itertools.takewhile(lambda line: not line.startswith("Exception raised from"), lines))]
    return lines[0][:300] if lines else ""


def tell_launcher(error: BaseException) -> None:
    """Leave the line where torchrun looks for it: it then ends its report with it, as the root cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # The earliest counts, in whole seconds: what followed must stand after what it followed from, and before it if that
    # is a process which died without leaving such a file.
    later = 0 if not isinstance(error, EndedByOther) else 2 if error.only else -2
    at = int(time.time()) + later
    content = {"message": {"message": getattr(error, TOLD, summary(error)), "extraInfo": {"timestamp": str(at)}}}
    try:
        Path(path).write_text(json.dumps(content), encoding="utf-8")
    except OSError as refused:
        sys.stderr.write(f"{path}: can't be written ({refused.strerror}), so torchrun won't repeat the cause\n")
