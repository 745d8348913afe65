"""Real runs as measurements: train.py is started as a process, its records are read meanwhile, then it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.records import BatchRecord
from fasttrain.tools import project

WARM_UP = 3  # batches that don't count: workers start, kernels are chosen
FEWEST = 12  # batches that a measurement rests on
LONGEST = 3.0  # times as long as asked, after which fewer will do
PATIENCE = 900.0  # seconds without a first batch: the data set may have to be fetched or listed
POLL = 0.1  # seconds
GRACE = 40.0  # seconds to end in, after which a process is killed; torchrun gives its own 30
LAUNCHERS = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
# Nothing is kept of such a run, and nothing interrupts it.
OWN = (
    "resume=null",
    "checkpoint.every_minutes=1e6",
    "checkpoint.every_steps=null",
    "dashboard.tensorboard=false",
    "profile.steps=null",
    "train.early_stop=null",
    "train.epochs=100000",
)
MOST_STEPS = 20_000  # should the command that started it be killed, it ends by itself


@dataclass(frozen=True)
class Measured:
    """What the records of a run say. Times in seconds; shares are parts of the summed time of batches."""

    images_per_second: float  # of all ranks; what only used up batches that had lain ready doesn't count
    step: float  # mean time from batch to batch
    wait: float  # share of waiting for data
    busy: float  # share of forward, backward and optimizer: "device busy"
    batches: int
    seconds: float


def summary(records: Sequence[BatchRecord], world: int) -> Measured:
    """Of all these records, from one rank.

    A loader that is too slow hides behind batches made ahead until they are used up: those are taken off, as the
    difference of what lay ready in the first and in the last fifth.
    """
    wall = sum(record.wall for record in records)
    images = sum(record.images for record in records)
    part = max(1, len(records) // 5)
    ready = [record.ready for record in records if record.ready is not None]
    used_up = max(0.0, fmean(ready[:part]) - fmean(ready[-part:])) if len(ready) == len(records) else 0.0
    computing = sum(record.forward + record.backward + record.optimizer for record in records)
    return Measured(
        images_per_second=images * max(0.1, 1 - used_up / len(records)) * world / wall,
        step=wall / len(records),
        wait=sum(record.wait for record in records) / wall,
        busy=computing / wall,
        batches=len(records),
        seconds=wall,
    )


def command(module_or_file: Sequence[str], processes: int) -> list[str]:
    """A Python program as one process, or as several under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(launcher if processes > 1 else []), *module_or_file]


def environment() -> dict[str, str]:
    """This process' variables without those of the launcher that started it, and with the project to import from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(project.HOME), kept.get("PYTHONPATH"))))
    return kept


@contextlib.contextmanager
def started(arguments: Sequence[str], output: Path, ask: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all it starts, ended with the block.

    Args:
        ask: to end; killed after `GRACE` seconds. False: killed at once, where nothing of it is wanted.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(
            arguments,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the command, which ends this in its own order
        )
        try:
            yield process
        finally:
            _end(process, ask)


def _end(process: subprocess.Popen[bytes], ask: bool) -> None:
    """No process of the group is left behind."""
    kill = getattr(signal, "SIGKILL", signal.SIGTERM)
    for number in (signal.SIGTERM, kill) if ask else (kill,):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone
            if hasattr(os, "killpg"):
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


def reason(output: Path) -> str:
    """Why a process failed: the first error in what it printed, else its last line."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.split("ERROR", 1)[-1] for line in lines if " ERROR " in line or line.startswith("error: ")]
    return " ".join((errors or lines or ["it printed nothing"])[0 if errors else -1].removeprefix("error: ").split())


class Runs:
    """Starts trainings with changed settings and measures them.

    Args:
        overrides: of every run.
        folder: for run directories; each run's is its own.
        seconds: to measure.
        processes: training processes.
    """

    def __init__(self, overrides: Sequence[str], folder: Path, seconds: float, processes: int = 1) -> None:
        self.overrides, self.folder, self.seconds, self.processes = list(overrides), folder, seconds, processes
        self.count = 0

    def measure(self, changes: Sequence[str] = ()) -> tuple[Measured, Path]:
        """One run with these settings changed.

        Returns:
            What was measured, and the run directory.

        Raises:
            UserError: it failed, in its own words.
        """
        self.count += 1
        directory, output = self.folder / f"run{self.count}", self.folder / f"run{self.count}.txt"
        steps = f"train.max_steps={MOST_STEPS}"
        settings = [*self.overrides, *OWN, steps, *changes, f"run.dir={directory}"]
        arguments = command([str(project.HOME / "train.py"), *settings], self.processes)
        # A training that is asked to end saves last.pt first. Its ranks are torchrun's to end.
        with started(arguments, output, ask=self.processes > 1) as process:
            records = self._collect(process, directory / "rank0.jsonl", output)
        return summary(records, self.processes), directory

    def _collect(self, process: subprocess.Popen[bytes], file: Path, output: Path) -> list[BatchRecord]:
        began = time.monotonic()
        records: list[BatchRecord] = []
        rows = history.Tail(file)
        while True:
            over = process.poll() is not None
            records += [record for row in rows() if (record := history.record_of(row)) is not None]
            counted = records[WARM_UP:]
            spent = sum(record.wall for record in counted)
            if spent >= self.seconds and (len(counted) >= FEWEST or spent >= LONGEST * self.seconds):
                return counted
            if over:
                if process.returncode == 0 and len(counted) >= 3:  # a short training: all of it
                    return counted
                raise UserError(
                    reason(output) if process.returncode else f"{len(records)} batches are too few to measure"
                )
            if not records and time.monotonic() - began > PATIENCE:
                raise UserError(f"no batch within {PATIENCE:.0f} s: look at {output}")
            time.sleep(POLL)
