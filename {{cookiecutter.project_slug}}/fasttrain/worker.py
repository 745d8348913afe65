"""What runs in a loader worker: the samples of a batch, each with its draws seeded, written into a slot.

A sample that can't be read raises a `UserError` (`images.ImageError` names the file). Then `data.on_error` decides:
the training ends, or another sample, drawn from (seed, epoch, index), takes its place; in validation it is left out.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from fasttrain import seeding
from fasttrain.effort import Meter, UsageClock
from fasttrain.errors import UserError
from fasttrain.logs import WorkerLog
from fasttrain.sampler import BatchKey
from fasttrain.slots import Misfit, Slot, Slots, is_later
from fasttrain.transfer import Bad, Batch
from fasttrain.watchdog import die_with_parent

VALIDATION_EPOCH = (1 << 40) - 1  # validation draws, should there be any, are the same each time
TRIES = 20  # samples drawn in the place of a bad one
AHEAD = 16  # samples that are drawn and read before the first of them is made; their files lie in memory meanwhile


class MapDataset(Protocol):
    """A data set with a length and an index: what `Feed` takes.

    It may also have ``unfinished(index)``: the same sample, all its draws made, in which an item may be `Later`. And it
    may have ``prefetch(indices)``, which is told what a batch will ask for, and ``stored``: raw, jpeg or memory.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Later(Protocol):
    """An item of a sample that is made once its place in the batch is known, such as `images.Crop`.

    Attributes:
        shape, dtype: of the array that it will be.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def write(self, out: np.ndarray) -> None:
        """Make it in `out`. Raises: UserError: it can't be made."""


class Failed(NamedTuple):
    """A UserError on its way to the training process: raised in a worker, the DataLoader would add a traceback."""

    text: str
    exit_code: int


class Stack:
    """A batch that is stacked by default_collate: for samples that slots can't hold."""

    def __init__(self) -> None:
        self.samples: list[Any] = []

    def put(self, sample: Any, index: int) -> None:
        if isinstance(sample, (tuple, list)) and any(map(is_later, sample)):
            sample = tuple(_made(item) if is_later(item) else item for item in sample)
        self.samples.append(sample)

    def tensors(self) -> Any:
        """In a worker default_collate writes into new shared memory."""
        tensors = default_collate(self.samples) if self.samples else ()
        return tuple(tensors) if isinstance(tensors, list) else tensors  # what it makes of a tuple


def _made(item: Later) -> np.ndarray:
    out = np.empty(item.shape, item.dtype)
    item.write(out)
    return out


class Samples(Dataset[Any]):
    """The user's data set as the DataLoader sees it: a whole batch a call.

    Args:
        on_error: ``data.on_error``: fail or skip.
        made: int64 in shared memory, the batches made so far, one place a worker.
    """

    def __init__(
        self, dataset: MapDataset, seed: int, rank: int, training: bool, on_error: str, made: torch.Tensor
    ) -> None:
        self.dataset, self.seed, self.rank, self.training = dataset, seed, rank, training
        self.on_error, self.made = on_error, made
        self.slots: Slots | None = None  # set before the workers start, if the samples fit
        self.usage = UsageClock()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: BatchKey) -> Batch | Failed:
        info = get_worker_info()
        worker = None if info is None else info.id
        meter = Meter(alone=worker is not None)
        into = Stack() if self.slots is None else self.slots.next(worker or 0)
        epoch = key.epoch if self.training else VALIDATION_EPOCH
        used: list[int] = []
        bad: list[Bad] = []
        if (prefetch := getattr(self.dataset, "prefetch", None)) is not None:
            prefetch(key.indices)
        try:
            for index, sample in self._drawn(into, epoch, key.indices, meter):
                try:
                    if isinstance(sample, UserError):
                        raise sample
                    into.put(sample, index)
                    used.append(index)
                except Misfit:
                    raise
                except UserError as error:
                    if self.on_error == "fail":
                        error.args = (f"{error}; data.on_error=skip goes on without such samples",)
                        raise
                    bad.append(Bad(index, str(error)))
                    if self.training:
                        used.append(self._another(into, epoch, index))
        except UserError as error:
            return Failed(str(error), error.exit_code)
        seeding.seed_all(self.seed, seeding.BATCH, epoch, self.rank, key.number)  # for whatever else draws in here
        tensors, slot = (into.tensors(), None) if isinstance(into, Stack) else (None, into.number)
        if worker is not None:
            self.made[worker] += 1
        usage = None if worker is None else self.usage.due(worker)
        effort = meter.stop()
        made = Batch(tensors, used, key.epoch, key.number, key.last, key.end, effort.seconds, worker)
        made.slot, made.bad, made.effort, made.usage = slot, bad, effort, usage
        return made

    def _drawn(self, into: Slot | Stack, epoch: int, indices: list[int], meter: Meter) -> Iterator[tuple[int, Any]]:
        """The samples, each with its draws seeded, or the `UserError` that came instead of one.

        Those of a data set that leaves work for later come `AHEAD` at a time, see `images.Crop`; what is done with them
        until the next is asked for is then a part of making them.
        """
        start = seeding.mix(self.seed, seeding.SAMPLE, epoch)
        read, ahead = _reader(self.dataset, into)
        for first in range(0, len(indices), ahead):
            drawn: list[tuple[int, Any, float]] = []
            for index in indices[first : first + ahead]:
                seeding.seed_all(index, start=start)
                began = time.perf_counter()
                try:
                    sample = read(index)
                except UserError as error:
                    sample = error
                drawn.append((index, sample, time.perf_counter() - began))
            for index, sample, seconds in drawn:
                began = time.perf_counter()
                yield index, sample
                meter.sample(seconds + (time.perf_counter() - began if ahead > 1 else 0.0))

    def _another(self, into: Slot | Stack, epoch: int, index: int) -> int:
        """Put a sample in the place of a bad one, the same whichever process meets it; returns its index."""
        read, _ = _reader(self.dataset, into)
        for attempt in range(TRIES):
            value = seeding.mix(self.seed, seeding.REPLACEMENT, epoch, index, attempt)
            other = value % len(self.dataset)
            seeding.seed_all(value)
            try:
                into.put(read(other), other)
                return other
            except Misfit:
                raise
            except UserError as error:  # named when its own turn comes
                last = error
        raise UserError(f"{last}; {TRIES} samples drawn one after another can't be read either: check data.path")


def _reader(dataset: MapDataset, into: Slot | Stack) -> tuple[Callable[[int], Any], int]:
    """What makes a sample, and how many to draw ahead: a slot takes unfinished samples, default_collate doesn't."""
    unfinished = getattr(dataset, "unfinished", None)
    if unfinished is None or isinstance(into, Stack):
        return dataset.__getitem__, 1
    return unfinished, AHEAD


def as_it_is(batch: Any) -> Any:
    """The DataLoader's collate_fn: the batch is assembled already."""
    return batch


class WorkerInit:
    """Runs first in each loader worker: seeds, logging, and no threads of its own."""

    def __init__(self, seed: int, rank: int, worker_log: WorkerLog | None) -> None:
        self.seed, self.rank, self.worker_log, self.parent = seed, rank, worker_log, os.getpid()

    def __call__(self, worker: int) -> None:
        die_with_parent(self.parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the training process decides
        if hasattr(signal, "alarm"):
            signal.signal(signal.SIGTERM, _end_soon)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        seeding.seed_all(self.seed, seeding.WORKER, self.rank, worker)
        torch.set_num_threads(1)
        if "cv2" in sys.modules:  # OpenCV's own threads fight with the other workers for the cores
            sys.modules["cv2"].setNumThreads(0)
        if self.worker_log is not None:
            self.worker_log.start(worker)


def _end_soon(number: int, frame: FrameType | None) -> None:
    """A SIGTERM to the whole group (timeout, scancel) is the training process's to answer: it finishes its step first.

    The second one is from the training process itself.
    """
    asked_before = signal.alarm(0)
    signal.alarm(5 if asked_before else 60)  # whose signal ends the process


def lost_worker(error: BaseException) -> UserError | None:
    """What PyTorch says of a dead loader worker, as one line with what to look at; None for any other error.

    PyTorch raises it in the training process wherever that is at the moment, since it learns of it by a signal.
    """
    chain: list[str] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        chain.append(str(link))
        link = link.__cause__ or link.__context__
    text = " ".join(" ".join(chain).split())
    if not isinstance(error, (RuntimeError, OSError)):
        return None
    if "unable to allocate shared memory" in text or "unable to write to file </torch_" in text:
        return UserError(f"a loader worker found /dev/shm full: {_SHM}")
    pid = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", text)
    if pid is None:
        return None
    killed = re.search(r"killed by signal: ([\w ]+)", text)
    code = re.search(r"with exit code (-?\d+)", text)
    how = f"was killed by signal {killed[1].strip()}" if killed else "died"
    if code is not None:
        how = f"ended with exit code {code[1]}"
    if killed and killed[1].startswith("Bus error"):
        advice = f"/dev/shm is probably full: {_SHM}"
    elif killed and killed[1].startswith("Killed"):
        advice = "if nobody did that, memory ran out: lower data.workers, data.prefetch_factor or data.batch_size"
    else:
        advice = "data.workers=0 loads in the training process, where the cause can be seen"
    return UserError(f"loader worker (process {pid[1]}) {how}; {advice}")


_SHM = "enlarge it (docker run --shm-size=2g) or lower data.workers, data.prefetch_factor or data.batch_size"
