"""Kill a training again and again; in the end it must equal one that nobody touched, bit for bit.

    python tests/soak.py 100        a hundred kills, about six a training; `make soak KILLS=100`

Two processes with a loader worker each, a save after every step. A third of the kills come inside a save: before the
snapshot, while the file is written, right after; of the training process or of the saver. The others come at random
moments to a random process: a rank, a loader worker, the saver, torchrun. torchrun restarts its ranks by itself; when
it was the one that was killed, or gave up, the same line is started again.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from faults import HOME, processes_of

PER_TRAINING = 6  # kills, a third of them inside a save
STEPS = 4 * 8  # epochs times steps
LIMIT = 900.0  # seconds for one training with all its kills
TO_END = 60.0  # seconds for the ranks to notice that torchrun is gone
SETTINGS = (
    "data.image_size=16",
    "data.batch_size=4",
    "data.workers=1",
    "train.epochs=4",
    "train.mixup=0.2",
    "optimizer.lr=0.02",
    "optimizer.warmup_steps=4",
    "checkpoint.every_steps=1",
    "run.timeout=30",
    "resume=auto",
    "amp=off",
)


@dataclass
class Job:
    """One training, started as often as it takes."""

    images: Path
    folder: Path
    faults: str = "trace"
    starts: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=100"]
        settings = [*SETTINGS, f"data.path={self.images}", f"run.dir={self.run}"]
        changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FASTTRAIN_FAULT": self.faults}
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *launcher, str(HOME / "train.py"), *settings],
                cwd=self.folder,
                env={**os.environ, **changed},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """End whatever is left of it."""
        for process in processes_of(self.run):
            process.kill()


class Trouble(Exception):
    """The promise does not hold."""


def soak(job: Job, kills: int, pace: float, dice: random.Random) -> int:
    """Train to the end under so many kills, a third inside saves; how many there were.

    Args:
        pace: seconds that an untouched training takes.
    """
    inside = (kills + dice.randrange(3)) // 3
    marks = [job.folder / f"mark{number}" for number in range(inside)]
    job.faults = "; ".join(["trace", *(_inside_a_save(mark, dice) for mark in marks)])
    began, outside, process = time.monotonic(), 0, job.start()
    due = time.monotonic() + dice.uniform(0.2, 1.2) * pace
    while (code := process.poll()) != 0:
        if time.monotonic() - began > LIMIT:
            raise Trouble(f"not at its end after {LIMIT:g} s and {job.starts} starts")
        if code is not None:  # torchrun was killed
            _wait_for_orphans(job)
            process = job.start()
        elif outside < kills - inside and time.monotonic() > due:
            outside += _kill_one(job, process, dice)
            due = time.monotonic() + dice.uniform(0.2, 1.2) * pace
        time.sleep(0.01)
    _wait_for_orphans(job)
    return outside + sum(mark.exists() for mark in marks)


def _inside_a_save(mark: Path, dice: random.Random) -> str:
    kind, phase = dice.choice([("kill", "save"), ("kill", "writing"), ("kill", "saved"), ("saver", "writing")])
    return f"{kind}@step={dice.randrange(1, STEPS)},phase={phase},once={mark}"


def _kill_one(job: Job, launcher: subprocess.Popen[bytes], dice: random.Random) -> int:
    """SIGKILL to one of the training's processes, whatever it does. 0 if it was gone already."""
    ranks = [child for child in _children(launcher.pid) if f"run.dir={job.run}" in " ".join(_words(child))]
    helpers = [child for rank in ranks for child in _children(rank.pid)]
    kinds = [kind for kind in ([psutil.Process(launcher.pid)], ranks, helpers) if kind]
    try:
        dice.choice(dice.choice(kinds)).kill()
    except psutil.NoSuchProcess:
        return 0
    return 1


def _children(pid: int) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return found


def _words(process: psutil.Process) -> list[str]:
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return found


def _wait_for_orphans(job: Job) -> None:
    until = time.monotonic() + TO_END
    while left := processes_of(job.run):
        if time.monotonic() > until:
            raise Trouble(f"{len(left)} processes outlived the launcher by {TO_END:g} s: {left}")
        time.sleep(0.05)


# ---- what must be equal ----------------------------------------------------------------------------------------------


def differences(one: Path, other: Path) -> list[str]:
    """Names of what differs between an untouched run and one that was killed."""
    found = []
    for name in ("last.pt", "best.pt"):
        first, second = (torch.load(run / name, weights_only=True) for run in (one, other))
        for part in ("model", "optimizer", "state", "metrics"):
            found += [
                f"{name}: {where}" for where in _unequal(first[part], second[part], part) if "run_id" not in where
            ]
    for rank in (0, 1):
        if _order(one, rank) != _order(other, rank):
            found.append(f"rank {rank}: the order of the samples")
        records = _by_step(one / f"rank{rank}.jsonl", "step", ("loss", "lr", "images"))
        for step, values in _by_step(other / f"rank{rank}.jsonl", "step", ("loss", "lr", "images")).items():
            if values != records[step]:
                found.append(f"rank {rank}: step {step}: {values}, expected {records[step]}")
    metrics = _by_step(one / "events0.jsonl", "epoch", ("accuracy", "loss"))
    for epoch, values in _by_step(other / "events0.jsonl", "epoch", ("accuracy", "loss")).items():
        if values != metrics[epoch]:
            found.append(f"epoch {epoch}: {values}, expected {metrics[epoch]}")
    return found


def _unequal(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {*one, *other}:
            yield from _unequal(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            yield from _unequal(first, second, f"{where}[{number}]")
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if not torch.equal(one, other):
            yield where
    elif one != other:
        yield where


def _order(run: Path, rank: int) -> dict[int, list[str]]:
    """Step -> the samples of it that counted: those of the last time."""
    lines = (line.split() for line in (run / f"order{rank}.txt").read_text().splitlines())
    return {int(step): indices for step, *indices in lines}


def _by_step(path: Path, key: str, fields: tuple[str, ...]) -> dict[int, tuple[Any, ...]]:
    """The last record of each step. A kill takes those along that were not yet written, and may tear a line."""
    found = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if all(field in record for field in (key, *fields)) and record.get("event", "validation") == "validation":
            found[record[key]] = tuple(record[field] for field in fields)
    return found


def untouched(images: Path, folder: Path) -> tuple[Job, float]:
    """The training that nobody kills, and the seconds that it takes."""
    folder.mkdir()
    job, began = Job(images, folder), time.monotonic()
    if job.start().wait(LIMIT) != 0:
        raise Trouble(f"the training fails without any kill:\n{(folder / 'output').read_text()[-3000:]}")
    return job, time.monotonic() - began


def main(kills: int, seed: int = 0) -> int:
    from fasttrain import shapes

    dice, done, equal, trainings = random.Random(seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        images = Path(name) / "images"
        shapes.draw(images, seed=1, train_per_class=8, val_per_class=2)
        expected, pace = untouched(images, Path(name) / "untouched")
        began = time.monotonic()
        while done < kills:
            trainings += 1
            job = Job(images, Path(name) / str(trainings))
            job.folder.mkdir()
            try:
                count = soak(job, min(PER_TRAINING, kills - done), pace, dice)
                wrong = differences(expected.run, job.run)
            except (Trouble, OSError) as trouble:
                count, wrong = 1, [str(trouble)]
            finally:
                job.kill()
            done += count
            equal += 0 if wrong else count
            seconds = time.monotonic() - began
            print(
                f"training {trainings}: {count} kills, {job.starts} starts, {done} of {kills} kills, {seconds:.0f} s: "
                f"{'equal' if not wrong else 'DIFFERENT'}",
                flush=True,
            )
            for each in wrong:
                print(f"    {each}", flush=True)
            if wrong:
                print((job.folder / "output").read_text()[-5000:], flush=True)
    print(f"{equal} of {done} kills: weights, optimizer, order of samples and metrics equal the untouched training's")
    return 0 if equal == done else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HOME))
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
