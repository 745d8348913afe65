"""The coarse part of ``tune``: one process (or one a rank) that measures many settings without starting anew.

    python -m fasttrain.tools.sweep PLAN        PLAN: a JSON file; tune.py starts it, under torchrun for several ranks

It writes what it measures, line by line, into the file that the plan names. Real runs confirm it afterwards.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fasttrain import host, settings
from fasttrain import machine as this_machine
from fasttrain.errors import UserError
from fasttrain.feed import Feed
from fasttrain.run import Run, exits_cleanly, start
from fasttrain.tools import project
from fasttrain.tools.batch_size import Sizes
from fasttrain.tools.bench import training_step
from fasttrain.tools.footprint import Machine, space
from fasttrain.tools.search import Choice, Space, explore, grow
from fasttrain.transfer import Batch, leaves

FEWEST = 6  # batches of a measurement
EPOCHS = 1 << 30


class Lab:
    """The owner's data, model and step, to be measured again and again with other loader settings.

    Args:
        seconds: of a measurement.
    """

    def __init__(self, cfg: Any, run: Run, seconds: float) -> None:
        data, model = project.module("data"), project.module("model")
        self.cfg, self.run, self.seconds = cfg, run, seconds
        self.sets = run.first_on_machine(lambda: data.build(cfg.data, cfg.seed))
        self.step = training_step(cfg, model, data, run.device, len(self.sets.classes))

    def start(self) -> Choice:
        """The settings now. threads is 0 where nothing is computed on the CPU: then they are left alone."""
        section = self.cfg.data
        workers = this_machine.default_workers(self.run.local_world) if section.workers is None else section.workers
        threads = torch.get_num_threads() if self.run.device.type == "cpu" else 0
        return Choice(workers, section.prefetch_factor, threads)

    def batch(self) -> Batch:
        """One batch that stays."""
        feed = self._feed(Choice(0, 1, 0))
        try:
            found = next(feed.train(0))
            found.tensors = tuple(tensor.clone() for tensor in leaves(found.tensors))
            self.has_slots = feed.train_samples.slots is not None
        finally:
            feed.close()
        return found

    def alone(self, batch: Batch, threads: int) -> float:
        """Images a second of the step on the same batch again and again: data for free."""
        self._use(threads)
        feed = self._feed(Choice(0, 1, 0))
        try:
            return self._speed(lambda: self.step(batch), 3, feed)
        finally:
            feed.close()

    def both(self, choice: Choice) -> float:
        """Images a second of loader and step together; 0 for settings that don't work here."""
        self._use(choice.threads)
        feed, error = None, None
        try:
            feed = self._feed(choice)
        except UserError as found:
            error = found
        try:
            self.run.agree(error)
        except UserError:
            return 0.0
        assert feed is not None
        batches = itertools.chain.from_iterable(feed.train(epoch) for epoch in range(EPOCHS))
        try:
            return self._speed(lambda: self.step(next(batches)), choice.workers + 2, feed)
        finally:
            feed.close()

    def _feed(self, choice: Choice) -> Feed:
        section = self.cfg.data
        section.prefetch_factor = choice.prefetch
        return Feed(
            self.sets.train,
            self.sets.val,
            section,
            workers=choice.workers,
            epochs=EPOCHS,
            seed=self.cfg.seed,
            rank=self.run.rank,
            world=self.run.world,
            device=self.run.device,
            worker_log=self.run.worker_log,
        )

    def _use(self, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)

    def _speed(self, once: Callable[[], int], warm_up: int, feed: Feed) -> float:
        for _ in range(warm_up):
            once()
        feed.clock.settle()
        ready, images, calls = feed.ready() or 0, 0, 0
        began = time.perf_counter()
        while not self._over(calls, time.perf_counter() - began):
            images += once()
            calls += 1
        feed.clock.settle()
        spent = time.perf_counter() - began
        used_up = max(0, ready - (feed.ready() or 0))  # made before the clock ran: they don't count
        return images * max(0.1, 1 - used_up / calls) * self.run.world / spent

    def _over(self, calls: int, seconds: float) -> bool:
        """Rank 0 decides for all, since each step waits for every rank."""
        if calls < FEWEST or (self.run.world > 1 and calls % 4):
            return False
        over = torch.tensor(seconds >= self.seconds)
        if self.run.world > 1:
            dist.broadcast(over, src=0)
        return bool(over)


class Told:
    """The file that tune reads while this runs."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def __call__(self, kind: str, **fields: Any) -> None:
        if self.file is not None:
            with self.file.open("a") as opened:
                opened.write(json.dumps({"kind": kind, **fields}) + "\n")


def sweep(lab: Lab, tell: Told, plan: dict[str, Any]) -> None:
    """Measure and search; every rank runs it, rank 0 decides."""
    run, first = lab.run, lab.start()
    kept = lab.batch()
    if plan["batch_size"]:
        fits = Sizes(lab.step, kept, run.device, plan["processes"])
        size, speeds = grow(fits, kept.size, most=len(lab.sets.train) // plan["processes"])
        tell("batch_size", size=size, speeds=speeds)
        return
    within = run.on_rank0(lambda: _space(lab, first, kept))
    values = Space(*(tuple(each) for each in within))
    free = {threads: lab.alone(kept, threads) for threads in values.threads}
    tell("headroom", free=free[first.threads], start=list(first), space=within, device=str(run.device))

    def both(choice: Choice) -> float:
        run.on_rank0(lambda: _plain(choice))
        speed = lab.both(choice)
        tell("speed", choice=list(choice), speed=speed)
        return speed

    if run.is_main:
        chosen, scores = explore(both, first, values, max(free.values()))
        run.on_rank0(lambda: _plain(None))  # the others stop, too
        tell("chosen", choice=list(chosen), speed=scores.of(chosen), start=scores.of(first))
    else:
        for choice in _told(run):
            lab.both(choice)


def _told(run: Run) -> Iterator[Choice]:
    """On the other ranks: what rank 0 measures next, until it is done."""
    while (choice := run.on_rank0(lambda: _plain(None))) is not None:
        yield Choice(*choice)


def _plain(choice: Choice | None) -> list[int] | None:
    return None if choice is None else list(choice)


def _space(lab: Lab, first: Choice, kept: Batch) -> list[list[int]]:
    """The values to try on this machine."""
    used, total = host.memory()
    size = sum(tensor.nbytes for tensor in leaves(kept.tensors)) // kept.size * lab.cfg.data.batch_size
    through_shm = not lab.has_slots and Path("/dev/shm").exists()
    machine = Machine(
        cores=this_machine.cores(),
        memory=total - used,
        shared=shutil.disk_usage("/dev/shm").free if through_shm else None,
        cautious=this_machine.is_windows_or_wsl(),
        forks=_forks(lab.cfg.data.start_method),
    )
    found = space(first, machine, size, lab.run.local_world, lab.run.device.type == "cpu")
    return [list(found.workers), list(found.prefetch), list(found.threads)]


def _forks(method: str | None) -> bool:
    return (method or multiprocessing.get_start_method()) == "fork"


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    with exits_cleanly():
        cfg, saved = settings.load(project.module("config").Config, project.HOME / "config.yaml", plan["overrides"])
        with start(saved, cfg.run, None, project.HOME) as run:
            lab = Lab(cfg, run, plan["seconds"])
            sweep(lab, Told(Path(plan["out"]) if run.is_main else None), plan)


if __name__ == "__main__":
    main()
