"""Faults on purpose, to test what happens then. Imported only if the environment variable FASTTRAIN_FAULT is set:

    FASTTRAIN_FAULT="raise@rank=1,step=3,phase=forward; kill@phase=save,once=/tmp/mark"

Kinds: raise (a fault of the code), user (an error the user can mend), exit (`sys.exit(3)`), vanish (`os._exit(3)`),
kill and stop (the signals), hang (for ever), slow (`seconds`), nan (the loss; phase=on: from that step on), worker
(kill a loader worker), launcher (kill the launcher), saver (kill the process that writes checkpoints), lose (`path` is
renamed), trace (the indices of each batch are written to order<rank>.txt; has no place).

Phases: sample (in the loader, where the batch is made), data (where the loop asks for it), forward, backward, optimizer
(at the end of each), validation (before its first batch), save (before a checkpoint is taken), writing (while it is
written, in another thread), saved (after, in that thread). Steps count from 1. `once` names a file that is made: while
it is there the fault stays away.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fasttrain.errors import UserError
from fasttrain.feed import Feed
from fasttrain.sampler import BatchKey
from fasttrain.state import State
from fasttrain.update import Update
from fasttrain.watch import Watch
from fasttrain.worker import Samples
from fasttrain.writer import Saver, Writer


@dataclass
class Fault:
    """One fault, and where it happens."""

    kind: str
    rank: int = 0
    step: int = 1
    phase: str = "forward"
    seconds: float = 5.0
    path: str = ""
    once: str = ""
    done: bool = field(default=False, init=False)

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, _, rest = text.strip().partition("@")
        places: dict[str, Any] = dict(part.split("=", 1) for part in rest.split(",") if part)
        for name, convert in (("rank", int), ("step", int), ("seconds", float)):
            if name in places:
                places[name] = convert(places[name])
        return cls(kind, **places)

    def is_due(self, rank: int, step: int, phase: str) -> bool:
        if self.done or (rank, phase) != (self.rank, self.phase) or step < self.step:
            return False
        self.done = True
        if self.once:
            try:
                os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        return True

    def happen(self) -> None:
        _KINDS[self.kind](self)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"planted at rank {fault.rank}, step {fault.step}, {fault.phase}")


def _user(fault: Fault) -> None:
    raise UserError(f"planted by the user at rank {fault.rank}, step {fault.step}, {fault.phase}")


def _saver(fault: Fault) -> None:
    for child in psutil.Process().children():
        if any(part.endswith("saver.py") for part in child.cmdline()):
            child.kill()


def _worker(fault: Fault) -> None:
    victim = next(child.pid for child in multiprocessing.active_children() if child.daemon)
    os.kill(victim or 0, signal.SIGKILL)
    time.sleep(30)  # PyTorch raises it in here


_KINDS: dict[str, Callable[[Fault], Any]] = {
    "raise": _raise,
    "user": _user,
    "saver": _saver,
    "worker": _worker,
    "exit": lambda fault: sys.exit(3),
    "vanish": lambda fault: os._exit(3),
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "launcher": lambda fault: os.kill(os.getppid(), signal.SIGKILL),
    "hang": lambda fault: time.sleep(10**6),
    "slow": lambda fault: time.sleep(fault.seconds),
    "lose": lambda fault: Path(fault.path).rename(fault.path + ".lost"),
    "nan": lambda fault: None,  # see Injector.nan
    "trace": lambda fault: None,
}


class Injector:
    """The faults of one process."""

    def __init__(self, faults: list[Fault], rank: int) -> None:
        self.faults, self.rank, self.step = faults, rank, 1

    def at(self, phase: str, step: int | None = None) -> None:
        """Something reached this phase."""
        for fault in self.faults:
            if fault.kind != "nan" and fault.is_due(self.rank, self.step if step is None else step, phase):
                fault.happen()

    def in_loader(self, samples: Samples, key: BatchKey) -> None:
        """A batch is about to be made; each is a step, if nothing is accumulated."""
        if samples.training:
            self.at("sample", key.epoch * (key.last + 1) + key.number + 1)

    def while_written(self, directory: Path) -> None:
        """A file is about to be written. The fault happens once there is something of it."""

        def watch() -> None:
            until = time.monotonic() + 5
            while time.monotonic() < until and not any(name.endswith(".tmp") for name in os.listdir(directory)):
                continue
            self.at("writing")

        if any(fault.phase == "writing" and not fault.done for fault in self.faults):
            threading.Thread(target=watch, daemon=True).start()

    def nan(self) -> bool:
        """Whether the loss is to be NaN in this step. At one step only, or from `step` on with phase=on."""
        for fault in self.faults:
            if fault.kind != "nan" or fault.rank != self.rank:
                continue
            if self.step == fault.step or (fault.phase == "on" and self.step >= fault.step):
                if fault.once:
                    Path(fault.once).touch()
                return True
        return False


def install(text: str, rank: int, directory: Path) -> None:
    """Hook the faults in where the training passes anyway. Changes the classes of this process."""
    faults = [Fault.parse(part) for part in text.split(";") if part.strip()]
    injector = Injector(faults, rank)
    order = (directory / f"order{rank}.txt").open("a") if any(f.kind == "trace" for f in faults) else None

    def before(owner: Any, name: str, hook: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def hooked(*args: Any, **options: Any) -> Any:
            hook(*args)
            return original(*args, **options)

        setattr(owner, name, hooked)

    def after(owner: Any, name: str, hook: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def hooked(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            hook(*args)
            return result

        setattr(owner, name, hooked)

    states: list[State] = []
    before(State, "remaining_epochs", lambda state, *args: states.append(state))
    after(Watch, "mark", lambda watch, phase: injector.at(phase))
    before(Feed, "validation", lambda feed: injector.at("validation"))
    before(Samples, "__getitems__", lambda samples, key: injector.in_loader(samples, key))
    before(Writer, "save", lambda *args: injector.at("save"))
    before(Saver, "write", lambda *args: injector.while_written(directory))
    after(Saver, "write", lambda *args: injector.at("saved"))
    train, backward = Feed.train, Update.backward

    def traced(feed: Feed, *args: Any, **options: Any) -> Iterator[Any]:
        batches = train(feed, *args, **options)
        while True:
            injector.step = states[-1].step + 1
            injector.at("data")
            batch = next(batches, None)
            if batch is None:
                return
            if order is not None:
                order.write(f"{injector.step} {' '.join(map(str, batch.indices))}\n")
                order.flush()
            yield batch

    def spoilt(update: Update, loss: Any) -> None:
        backward(update, loss * float("nan") if injector.nan() else loss)

    Feed.train = traced  # type: ignore[method-assign,assignment]
    Update.backward = spoilt  # type: ignore[method-assign,assignment]
