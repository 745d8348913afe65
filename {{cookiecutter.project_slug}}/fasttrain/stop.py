"""Ending on request: after SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 to any rank, all ranks end at the same point, saved.

A training passes points: one after each optimizer step, one before and one after the metrics of a validation are
summed. All ranks pass the same ones, but on a device not at the same time. A thread on each rank hears of the signal,
its own or through the launcher's store, and writes there the point that this rank comes to next, which it then waits
at. Once all have written, the last of these points is the one to end at: no rank has passed it. So a normal step
costs a comparison, and no rank waits for another before a stop is asked for.

A training that doesn't get there in time (a rank waits for one that is gone) is ended from the thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import psutil
import torch.distributed as dist
from loguru import logger

from fasttrain.errors import UserError, one_line

T = TypeVar("T")
MARKER = "preempted"  # the file in the run directory that says: not finished, start it again
EVERY = 0.25  # seconds between two looks at the store
ANSWER = 10.0  # seconds after which a rank that hasn't written its point is taken to be gone
BY_ITSELF = 2.0  # seconds that the main thread has to end by itself after a second Ctrl-C
LAST_WORDS = 5.0  # seconds for the log to be written when the process is ended from the thread
HELD_BACK = {signal.SIGUSR1} if hasattr(signal, "SIGUSR1") else set()


class Stopped(SystemExit):
    """A signal asked for the end. The exit code is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Stop:
    """The stop of this process, asked for or not. Without `listen` and `begin` it never comes.

    Attributes:
        save: called on rank 0 at the end point: writes last.pt and waits for it.
        seconds: from the signal to the end of the process, whatever happens.
        failed: gives the cause, if another rank has failed: then there is nothing to agree on.
        give_up: called before the thread ends the process, with whether all was in order but for the time.
    """

    def __init__(self) -> None:
        self.rank, self.world, self.seconds = 0, 1, 25.0
        self.save: Callable[[], None] = lambda: None
        self.give_up: Callable[[bool], None] = lambda in_order: None
        self.failed: Callable[[], object | None] = lambda: None
        self.asked: int | None = None  # the signal
        self.passed = 0  # points
        self._frozen = False  # the next point is written down: not to be passed before the end point is known
        self._until: int | None = None
        self._lost: str | None = None  # why the ranks can't agree
        self._asked_at = 0.0
        self._interrupts = self._interrupts_heard = 0  # Ctrl-C: that reached the main thread, and the other
        self._training = self._over = False
        self._store: Any = None
        self._told = 0  # texts from rank 0 that were said here
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stop", daemon=True)

    def listen(self) -> None:
        """Take over the signals, in the main thread. Until `begin` they end the process at once."""
        self._here, there = socket.socketpair()
        there.setblocking(False)
        # The interpreter writes a signal's number there even while the main thread is deep in a wait for other ranks.
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        self._there = there
        _listening.add(self)
        for number in (signal.SIGTERM, signal.SIGINT, *HELD_BACK):
            if signal.getsignal(number) is not signal.SIG_IGN:  # a background job of a shell ignores Ctrl-C
                self._before[number] = signal.signal(number, self._heard)
        if HELD_BACK and hasattr(signal, "sigtimedwait"):
            # A signal to the whole group reaches processes that would die of it (multiprocessing's own among them).
            # They inherit that it is held back; here the thread collects it.
            signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)

    def begin(self, rank: int, world: int, token: str) -> None:
        """The loop begins: from here on a signal is a request. `token`: the same on all ranks, another each start."""
        self.rank, self.world = rank, world
        if world > 1:
            stores: Any = dist  # which exports them, unknown to type checkers
            server = stores.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
            self._store = stores.PrefixStore(f"stop-{token}", server)  # a connection of its own: nothing waits for it
        self._training = True
        if self._before:
            self._thread.start()

    def check(self) -> None:
        """A point: all ranks end here, rank 0 after saving, if a stop was asked for.

        Raises:
            Stopped: that is so.
            UserError: a rank doesn't answer.
        """
        self.passed += 1
        if self._frozen and self._end_point() <= self.passed:
            self._end()

    def until_stopped(self, items: Iterable[T]) -> Iterator[T]:
        """The items; given up, at the point that comes after them, if a stop was asked for."""
        for item in items:
            if self._frozen and self._end_point() <= self.passed + 1:
                break
            yield item
        self.check()

    def tell(self, text: str) -> None:
        """From rank 0, in any thread: a line for every rank's log, which has it within a second."""
        self._told += 1
        self._put(f"told{self._told}", text)

    def abort(self, text: str) -> None:
        """From another thread: nothing is left to agree on or to save. The loop raises this at its next point."""
        self._lost, self._frozen = text, True

    def over(self) -> None:
        """The training is done: a stop changes nothing any more, and no other rank need wait for this one."""
        self._over = True
        if self.asked is None:
            self._put(f"at{self.rank}", str(self.passed + 1))

    def close(self) -> None:
        """Stop listening and give the signals back."""
        self._closed.set()
        if not self._before:
            return
        self._end_thread()
        signal.set_wakeup_fd(-1)
        if HELD_BACK and hasattr(signal, "sigtimedwait"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._heard:  # else somebody else's by now: failures.py ignores a SIGTERM
                signal.signal(number, handler)
        self._before = {}
        if not self._thread.is_alive():
            self._here.close()
            self._there.close()

    def _end_thread(self) -> None:
        if self._thread.is_alive():
            self._there.send(b"\0")  # no signal: it is waiting for one
            self._thread.join(LAST_WORDS)  # not for ever: it may be asking a store that is gone

    # ---- in the main thread ------------------------------------------------------------------------------------------

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. During the training the thread does the work."""
        if os.getpid() != self._pid:  # a forked loader worker, before it has handlers of its own
            return
        self._interrupts += number == signal.SIGINT
        if self._training and self._interrupts < 2:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Stopped(number)

    def _put(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except RuntimeError as error:  # the launcher is gone, and soon so are the ranks
                logger.debug(f"{key} can't be told to the other ranks: {error}")

    def _end_point(self) -> int:
        while self._until is None:
            if self._lost is not None:
                raise UserError(self._lost)
            time.sleep(0.02)  # not an event's wait: a signal handler may raise here, and leaves no lock behind
        return self._until

    def _end(self) -> NoReturn:
        assert self.asked is not None
        if self.rank == 0:
            self.save()
            self._put("saved", "1")
        else:  # the launcher ends all ranks soon after the first that is gone
            while self._lost is None and not self._store.check(["saved"]):
                time.sleep(0.05)
        raise Stopped(self.asked)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._hear(EVERY if self.asked is None else EVERY / 5)
            try:
                self._agree()
            except RuntimeError as error:  # of the store: the launcher is gone
                self._lost = f"the ranks can't agree where to stop: {one_line(error)}"
            if self.asked is not None and not self._over:
                self._hurry()

    def _hear(self, timeout: float) -> None:
        if select.select([self._here], [], [], timeout)[0]:
            for number in self._here.recv(64):
                if number in self._before:
                    self._came(number)
        if HELD_BACK and hasattr(signal, "sigtimedwait") and (info := signal.sigtimedwait(HELD_BACK, 0)):
            self._came(info.si_signo)

    def _came(self, number: int) -> None:
        # Counted here again: a main thread that is stuck outside of Python never comes to its signal handler.
        self._interrupts_heard += number == signal.SIGINT
        if self.asked is None:
            self._ask(number)
        elif number == signal.SIGINT and self._interrupts_heard >= 2:
            self._closed.wait(BY_ITSELF)
            if not self._closed.is_set():
                self._end_process("ended at once by a second Ctrl-C", in_order=False)

    def _ask(self, number: int) -> None:
        self.asked, self._asked_at = number, time.monotonic()
        if (cause := self.failed()) is not None:  # and now the launcher ends those that are left
            self.abort(str(cause))
        elif not self._over:
            again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            logger.warning(f"{Stopped(number).name}: the step is finished and saved, then the training ends{again}")

    def _agree(self) -> None:
        if self._lost is not None:
            self._frozen = self._frozen or self.asked is not None  # the main thread raises it at its next point
            return
        if self._store is None:
            if self.asked is not None and not self._frozen:
                self._frozen = True
                self._until = self.passed + 1  # read after the line above: the main thread can't pass it any more
            return
        if self.asked is None:
            if self._store.check(["asked"]):
                self._ask(int(self._store.get("asked")))
            elif self.rank and self._store.check([f"told{self._told + 1}"]):
                self._told += 1
                logger.warning(self._store.get(f"told{self._told}").decode())
            return
        if not self._frozen:
            self._store.set("asked", str(self.asked))
            self._frozen = True
            self._store.set(f"at{self.rank}", str(self.passed + 1))
        if self._until is None:
            points = [f"at{rank}" for rank in range(self.world)]
            if self._store.check(points):
                self._until = max(map(int, self._store.multi_get(points)))

    def _hurry(self) -> None:
        waited = time.monotonic() - self._asked_at
        if self._until is None and self._lost is None and waited > ANSWER:
            missing = [str(r) for r in range(self.world) if not self._store.check([f"at{r}"])]
            self._lost = f"rank {', '.join(missing)} doesn't answer: the training can't be stopped in order"
        if self._lost is not None and waited > ANSWER + LAST_WORDS:  # the main thread had time to raise it
            self._end_process(self._lost, in_order=False)
        if waited > self.seconds:
            text = f"not ended {self.seconds:g} s after the signal (checkpoint.stop_seconds): ended at once"
            self._end_process(text, in_order=True)

    def _end_process(self, text: str, in_order: bool) -> None:
        code = 128 + (self.asked or signal.SIGTERM)
        threading.Timer(LAST_WORDS, os._exit, (code,)).start()  # should even the log be stuck
        logger.bind(only=None if self.failed() is None else "file").critical(text)  # then it was said by another rank
        self.give_up(in_order)
        for child in psutil.Process().children(recursive=True):
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        os._exit(code)


_listening: weakref.WeakSet[Stop] = weakref.WeakSet()


def _in_forked_process() -> None:
    """Its signals are not this training's: a loader worker that is ended must not end all."""
    if len(_listening):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_process)


def mark(folder: Path, text: str) -> None:
    """Leave the marker, which says what happened and what to do."""
    try:
        (folder / MARKER).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        logger.warning(f"{folder / MARKER}: can't be written ({error.strerror})")
