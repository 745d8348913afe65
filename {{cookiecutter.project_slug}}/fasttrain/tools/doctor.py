"""``python -m fasttrain doctor [--processes N] [key=value ...]``: what would end a long run badly, found before it.

Each line is ok, a warning or an error, with what to do. Exits with 1 if there is an error. Under torchrun for that many
processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from rich.console import Console

from fasttrain import host, machine, settings
from fasttrain.errors import UserError
from fasttrain.gauges import Nvml
from fasttrain.slots import fields_of
from fasttrain.tools import checks, project
from fasttrain.tools.checks import Check
from fasttrain.tools.footprint import Machine, Need, need
from fasttrain.tools.search import Choice
from fasttrain.tools.trials import reason, started

TRAINER = {"cuda": 4e9, "mps": 2e9, "cpu": 1e9}  # bytes of host memory of a training process itself, roughly
READ, READ_SECONDS = 128e6, 2.0  # at most so much is read to measure the disk
JOIN = 90.0  # seconds that processes may take to find each other
COLOURS = {checks.OK: "green", checks.WARNING: "yellow", checks.ERROR: "red"}


@dataclass
class Patient:
    """The training to come."""

    cfg: Any
    processes: int
    device: str
    workers: int
    sets: Any  # data.build's
    sample: Any

    @property
    def method(self) -> str:
        return str(self.cfg.data.start_method or multiprocessing.get_start_method())

    @property
    def in_slots(self) -> bool:
        """Whether batches lie in memory that needs no /dev/shm."""
        return hasattr(os, "memfd_create") and not isinstance(fields_of(self.sample), str)

    def need(self) -> Need:
        size = bytes_of(self.sample) * self.cfg.data.batch_size
        choice = Choice(self.workers, self.cfg.data.prefetch_factor, 0)
        return need(choice, size, self.processes, self.method == "fork")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain doctor", description="What would end a long run badly, found before it."
    )
    parser.add_argument("--processes", type=int, help="training processes; by default one a GPU")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0
    cfg, _ = settings.load(project.module("config").Config, project.HOME / "config.yaml", options.overrides)
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    processes = options.processes or int(launched or max(1, torch.cuda.device_count()))
    logger.remove()  # what is found is said in lines of its own
    logger.add(sys.stderr, level="WARNING", format="{message}")
    found = []
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    for name, check in examine(cfg, processes):
        found.append(check.status)
        console.print(f"{check.status:<8}", style=COLOURS[check.status], end="")
        console.print(f"{name:<14} {check.text}")
        if check.remedy:
            console.print(f"{'':<23}do: {check.remedy}")
    errors, warnings = found.count(checks.ERROR), found.count(checks.WARNING)
    console.print(f"{len(found)} checks: {errors} errors, {warnings} warnings")
    return 1 if errors else 0


def examine(cfg: Any, processes: int) -> Iterator[tuple[str, Check]]:
    """All checks, each as soon as it is done."""
    kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if kind == "cuda" else []
    yield "device", checks.device(kind, names, torch.__version__, processes, driver())
    yield "NVML", checks.nvml(kind == "cuda" and not torch.version.hip, nvml_error() if kind == "cuda" else None)
    workers = machine.default_workers(processes) if cfg.data.workers is None else cfg.data.workers
    total = os.cpu_count() or 1
    yield "cores", checks.cores(total, machine.cores(), machine.cpu_quota(), processes, workers)
    yield "open files", checks.open_files(file_limit(), workers)
    try:
        sets = project.module("data").build(cfg.data, cfg.seed)
        patient = Patient(cfg, processes, kind, workers, sets, sets.train[0])
    except UserError as error:
        yield "data", Check(checks.ERROR, str(error), "python -m fasttrain check-data tells about all files")
        return
    except Exception as error:  # whatever the owner's data set raises
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(at.filename).name}, line {at.lineno}, in {at.name})"
        yield "data", Check(checks.ERROR, text, "mend data.py: the first sample can't be made; train.py shows it all")
        return
    yield from _of_data(patient)
    yield "checkpoints", _checkpoints(patient)
    yield "processes", _rendezvous(max(2, processes) if kind != "cuda" else processes, kind)


def _of_data(patient: Patient) -> Iterator[tuple[str, Check]]:
    cfg, train, wanted = patient.cfg, patient.sets.train, patient.need()
    used, total = host.memory()
    shm = Path("/dev/shm")
    free_shm = shutil.disk_usage(shm).free if shm.exists() else None
    this = Machine(machine.cores(), total - used, None if patient.in_slots else free_shm)
    yield "memory", checks.memory(wanted, TRAINER[patient.device] * patient.processes, total - used)
    several = patient.device == "cuda" and patient.processes > 1
    yield "shared memory", checks.shared_memory(wanted, this, several, free_shm)
    yield "start method", checks.start_method(patient.method, sys.platform, train, patient.workers)
    yield "classes", checks.classes(class_counts(train, len(patient.sets.classes)), patient.sets.classes)
    section = cfg.data
    yield (
        "batches",
        checks.batches(len(train), len(patient.sets.val), section.batch_size, patient.processes, section.drop_last),
    )
    yield "disk", checks.disk(*read_speed(train))


def bytes_of(sample: Any) -> int:
    """What a sample takes in a batch: its arrays, tensors and numbers, in tuples, lists and dictionaries."""
    if isinstance(sample, Mapping):
        return sum(map(bytes_of, sample.values()))
    if isinstance(sample, (tuple, list)):
        return sum(map(bytes_of, sample))
    return int(np.asarray(sample).nbytes)


def class_counts(dataset: Any, classes: int) -> list[int]:
    """Samples of each class, where the data set has its labels at hand; else nothing."""
    labels = getattr(getattr(dataset, "listing", dataset), "labels", None)
    if labels is None:
        return []
    return [int(count) for count in np.bincount(np.asarray(labels, dtype=np.int64), minlength=classes)]


def read_speed(dataset: Any) -> tuple[float | None, float | None]:
    """Bytes a second of files that the page cache doesn't hold, and a file's mean size; None where that isn't known."""
    listing = getattr(dataset, "listing", None)
    if listing is None or not hasattr(os, "posix_fadvise"):
        return None, None
    order = np.random.default_rng(0).permutation(len(listing))
    paths = (Path(listing.path(int(index))) for index in order)
    return timed_reads((path for path in paths if path.is_file()), time.perf_counter)


def timed_reads(paths: Iterator[Path], clock: Callable[[], float]) -> tuple[float | None, float | None]:
    """Read files, each dropped from the page cache before, until enough is known."""
    spent, read, files = 0.0, 0, 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = clock()
            read += len(file.read())
            spent += clock() - began
            files += 1
        if read > READ or spent > READ_SECONDS:
            break
    return (read / spent, read / files) if files and spent > 0 else (None, None)


def file_limit() -> int | None:
    """Open files that a process may have."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def driver() -> str | None:
    """The NVIDIA driver's version, if there is one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no library, no driver, no permission: a machine without NVIDIA
        return None
    return found.decode() if isinstance(found, bytes) else str(found)


def nvml_error() -> str | None:
    """Why the GPU can't be watched; None if it can."""
    try:
        for read in Nvml(0).readings().values():
            read()
    except Exception as error:  # NVML has an error of its own for each kind of trouble
        return str(error) or type(error).__name__
    return None


def _checkpoints(patient: Patient) -> Check:
    """Weights and the optimizer's state, against the disk of the run directory."""
    cfg = patient.cfg
    model = project.module("model").build_model(cfg.model, len(patient.sets.classes), cfg.data.image_size)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    size = weights * (3 if cfg.optimizer.name == "adamw" else 2)
    where = Path(cfg.run.dir) if cfg.run.dir else project.HOME
    while not where.exists():
        where = where.parent
    return checks.checkpoints(size, shutil.disk_usage(where).free, str(where))


def _rendezvous(processes: int, kind: str) -> Check:
    backend = "nccl" if kind == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        out, output = Path(folder) / "seconds", Path(folder) / "output.txt"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        arguments = [sys.executable, *launcher, "-m", "fasttrain.tools.rendezvous", str(out)]
        with started(arguments, output) as process:
            try:
                process.wait(JOIN)
            except subprocess.TimeoutExpired:
                return checks.rendezvous(processes, backend, None, f"not within {JOIN:.0f} s")
        if not out.exists():
            return checks.rendezvous(processes, backend, None, reason(output))
        return checks.rendezvous(processes, backend, float(out.read_text()), None)
