"""A run from its launch to its end: processes, device, run directory, logs, records; and what happens when it fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from loguru import logger

from fasttrain import facts, join, logs, rundir
from fasttrain.checkpoint import LAST
from fasttrain.device import pick_device, set_threads
from fasttrain.errors import UserError
from fasttrain.failures import Failures, tell_launcher
from fasttrain.settings import to_yaml
from fasttrain.stop import Stop, Stopped, mark
from fasttrain.watchdog import Watchdog, launcher
from fasttrain.worker import lost_worker

T = TypeVar("T")
OTHERS_WAIT = 30.0  # seconds that a rank waits before it says an error which rank 0 may be saying


@dataclass
class Run:
    """This process's place in the training, and the run directory.

    rank counts over all machines, local_rank on this one; started is when the run first began (``time.time()``),
    began when this process did; id is the run's own, kept when it is resumed; resume is the checkpoint to go on from;
    stop is where a signal to end is answered.
    """

    rank: int
    local_rank: int
    world: int
    local_world: int
    device: torch.device
    dir: Path = Path()
    resume: Path | None = None
    id: str = ""
    started: float = 0.0
    began: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # references unresolved
    home: Path = Path()  # the project's folder
    token: str = ""  # another each start, the same on all ranks
    log: logs.Log | None = None
    stop: Stop = field(default_factory=Stop)
    failures: Failures = field(default_factory=Failures)  # who failed first
    stack: ExitStack = field(default_factory=ExitStack)  # closed, last in first out, when the run ends

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def worker_log(self) -> logs.WorkerLog | None:
        """The logging of this rank's loader workers."""
        return None if self.log is None else self.log.worker_log()

    def begin_training(self) -> None:
        """All is checked: from here on this is a run, whose settings, versions and command line are written down."""
        if self.is_main:
            facts.put(self.dir / "config.yaml", to_yaml(self.settings))
            facts.write(self.dir / facts.FILE, self.id, self.home, self.device, self.world, self.started, self.began)
        self.stop.give_up = self._give_up
        self.stop.begin(self.rank, self.world, self.token)

    def how_to_go_on(self) -> str:
        if self.log is None:
            return "before the run directory was taken, so nothing is written there"
        if (self.dir / LAST).exists():
            return f"go on with run.dir={self.dir} resume=auto"
        return f"no {LAST} yet"

    def _give_up(self, in_order: bool) -> None:
        """The process is ended from the thread that waits for the stop."""
        if in_order and self.is_main:
            mark(self.dir, f"stopped by a signal, too late to save: {self.how_to_go_on()}")
        if self.log is not None:
            self.log.close()

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Run it on rank 0 and give everyone the result, or its UserError. The result must be plain data."""
        result, error = _outcome(function) if self.is_main else (None, None)
        self.agree(error)
        results: list[Any] = [result]
        if self.world > 1:
            dist.broadcast_object_list(results, src=0, device=torch.device("cpu"))
        agreed: T = results[0]
        return agreed

    def first_on_machine(self, function: Callable[[], T]) -> T:
        """Run it on the first process of each machine, then on the others: for files that are made on first use.

        If it fails with a UserError on any rank, all ranks raise that.
        """
        result: Any = None
        for turn_of_first in (True, False):
            error = None
            if turn_of_first == (self.local_rank == 0):
                result, error = _outcome(function)
            self.agree(error)
        agreed: T = result
        return agreed

    def agree(self, error: UserError | None) -> None:
        """Every rank must call it: if one has an error, all raise it, and none waits for another that is gone."""
        errors: list[UserError | None] = [error]
        if self.world > 1:
            errors *= self.world
            dist.all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                raise found


@contextmanager
def start(settings: Mapping[str, Any], run: Any, resume: str | None, home: Path) -> Iterator[Run]:
    """Join the other processes, choose the device, make the run directory and start the logs; undo it all at the end.

    Args:
        settings: all settings, references unresolved, to be saved with the run.
        run: the section ``run`` of the settings. resume: the setting.
        home: the project's folder; new runs go under ``home/runs``.

    Raises:
        UserError, SettingsError: more processes than GPUs; a run directory that can't be used.
    """
    stop = Stop()
    stop.listen()
    place = _place(run.timeout, run.threads)
    place.stop, stop.failed = stop, place.failures.known
    logs.early(run.log_level)
    with place.stack, _first_cause(place):
        place.stack.callback(stop.close)
        watchdog = place.stack.enter_context(Watchdog(place.failures, stop, launcher()))
        if join.launched():
            place.failures.share(join.join(place.device, run.timeout))
        place.began, place.settings, place.home = psutil.Process().create_time(), settings, home
        claimed = place.on_rank0(lambda: rundir.claim(run.dir, resume, place.began, home, place.stack))
        directory, saved, place.started, place.id, place.token = claimed
        place.dir, place.resume = Path(directory), None if saved is None else Path(saved)
        place.log = place.stack.enter_context(logs.start(place.dir, place.rank, run.log_level))
        watchdog.flush = place.log.close
        if os.environ.get("FASTTRAIN_FAULT"):  # only tests set it
            from fasttrain import inject

            inject.install(os.environ["FASTTRAIN_FAULT"], place.rank, place.dir)
        logger.info("run directory {}", place.dir)
        if resume == "auto":
            told = f"going on from {saved}" if saved else "nothing to resume, starting fresh"
            logger.info("resume=auto: {}", told + ("; only with run.dir set can a run be resumed" * (not run.dir)))
        yield place
        place.agree(None)  # no rank has succeeded before all have: the last save on rank 0 may fail
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _first_cause(place: Run) -> Iterator[None]:
    """Of all that is raised in all processes, what happened first is said; see failures.py."""
    try:
        yield
    except (Stopped, KeyboardInterrupt) as stop:
        if (other := place.failures.explain(stop, asked=True)) is not None:
            raise other from None
        how = f"stopped by {stop.name}" if isinstance(stop, Stopped) else "ended at once by Ctrl-C, without a save"
        text = f"{how}; {place.how_to_go_on()}"
        logger.warning(text)
        logs.mark_reported(stop)
        if place.is_main and isinstance(stop, Stopped) and place.log is not None:
            mark(place.dir, text)
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        clear = _as_line(error)
        if (other := place.failures.explain(clear or error)) is not None:
            raise other from None
        if clear is not None:
            raise clear from error
        raise


def _as_line(error: BaseException) -> UserError | None:
    """A dead loader worker, wherever in the loop PyTorch raises it, or `sys.exit` in the loop; None for all else."""
    if not isinstance(error, SystemExit):
        return lost_worker(error)
    exit_error = UserError(f"sys.exit({error.code!r}) was called in the training")
    exit_error.exit_code = error.code if isinstance(error.code, int) else 1
    return exit_error


@contextmanager
def exits_cleanly() -> Iterator[None]:
    """The outermost frame: one line for what the user can mend, a traceback for our own faults, an exit code not 0."""
    try:
        yield
    except UserError as error:
        if not logs.reported(error):  # before the run's log was open
            _let_rank0_speak(int(os.environ.get("LOCAL_RANK", "0")))
            sys.stderr.write(f"error: {error}\n")
        tell_launcher(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as error:
        if not logs.reported(error):
            sys.stderr.write("interrupted\n")
        sys.exit(130)
    except Exception as error:
        tell_launcher(error)
        if not logs.reported(error):
            raise
        sys.exit(1)


def _outcome(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


def _let_rank0_speak(local_rank: int) -> None:
    """Before they are joined all ranks meet the same errors, to be read once: the first says it, the launcher ends the
    rest.

    Should that not happen, the error is this rank's own after all, and is said after a while.
    """
    if local_rank > 0:
        time.sleep(OTHERS_WAIT)


def _place(timeout: float, threads: int | None) -> Run:
    """Read the launcher's variables, choose the device."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, local_rank, world, local_world = (int(os.environ[n]) for n in names) if join.launched() else (0, 0, 1, 1)
    device = pick_device(local_rank, local_world)
    set_threads(device, threads, local_world)
    return Run(rank, local_rank, world, local_world, device, failures=Failures(rank, world, timeout))
