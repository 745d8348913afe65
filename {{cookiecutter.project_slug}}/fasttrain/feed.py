"""Feeding the training: data set -> loader workers -> batches on the device.

The data set is the user's: ``__getitem__(index)`` gives a tuple of arrays and numbers of fixed shape. Workers run it
with every draw seeded by (seed, epoch, index), so that neither their number nor that of the processes changes what is
learnt.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from fasttrain import seeding
from fasttrain.clock import Clock, clock_of
from fasttrain.errors import SettingsError, UserError
from fasttrain.logs import WorkerLog
from fasttrain.sampler import BatchKey, GlobalOrderSampler, TrainingBatches, ValidationBatches
from fasttrain.transfer import Batch, to_device


class MapDataset(Protocol):
    """A data set with a length and an index: what `Feed` takes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


VALIDATION_EPOCH = (1 << 40) - 1  # validation draws, should there be any, are the same each time


class SeededSamples(Dataset[Any]):
    """The user's data set as the workers see it: a whole batch a call, every draw seeded, the time taken."""

    def __init__(self, dataset: MapDataset, seed: int, rank: int, training: bool, made: torch.Tensor) -> None:
        self.dataset, self.seed, self.rank, self.training = dataset, seed, rank, training
        self.made = made  # int64 in shared memory: batches made so far, one place a worker

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, key: BatchKey) -> tuple[BatchKey, float, list[Any] | UserError]:
        began = time.perf_counter()
        epoch = key.epoch if self.training else VALIDATION_EPOCH
        samples: list[Any] = []
        try:
            for index in key.indices:
                seeding.seed_all(self.seed, seeding.SAMPLE, epoch, index)
                samples.append(self.dataset[index])
        except UserError as error:  # as a value: the DataLoader would wrap it in a traceback
            return key, began, error
        seeding.seed_all(self.seed, seeding.BATCH, epoch, self.rank, key.number)  # for draws in collate
        return key, began, samples

    def collate(self, made: tuple[BatchKey, float, list[Any] | UserError]) -> Batch | UserError:
        """Assemble the batch: the DataLoader's own stacking, into shared memory when in a worker."""
        key, began, samples = made
        if isinstance(samples, UserError):
            return samples
        tensors = default_collate(samples)
        if isinstance(tensors, list):  # what the DataLoader makes of a tuple
            tensors = tuple(tensors)
        info = get_worker_info()
        worker = None if info is None else info.id
        if worker is not None:
            self.made[worker] += 1
        seconds = time.perf_counter() - began
        return Batch(tensors, key.indices, key.epoch, key.number, key.last, key.end, seconds, worker)


class WorkerInit:
    """Runs first in each loader worker: seeds, logging, and no threads of its own."""

    def __init__(self, seed: int, rank: int, worker_log: WorkerLog | None) -> None:
        self.seed, self.rank, self.worker_log = seed, rank, worker_log

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the training process decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        seeding.seed_all(self.seed, seeding.WORKER, self.rank, worker)
        torch.set_num_threads(1)
        if "cv2" in sys.modules:  # OpenCV's own threads fight with the other workers for the cores
            sys.modules["cv2"].setNumThreads(0)
        if self.worker_log is not None:
            self.worker_log.start(worker)


class Feed:
    """Gives the batches of an epoch, and those of validation, on the device.

    Args:
        train, val: data sets; a sample is a tuple of arrays and numbers of fixed shape.
        data: the section ``data`` of the settings.
        workers: loader processes of this rank.
        epochs: of the whole training.
        worker_log: logging of the loader workers (logs.WorkerLog).
    """

    def __init__(
        self,
        train: MapDataset,
        val: MapDataset,
        data: Any,
        *,
        workers: int,
        epochs: int,
        seed: int,
        rank: int,
        world: int,
        device: torch.device,
        worker_log: WorkerLog | None = None,
    ) -> None:
        self.data, self.workers, self.epochs = data, workers, epochs
        self.seed, self.rank, self.world, self.device = seed, rank, world, device
        self.clock: Clock = clock_of(device)
        self.init = WorkerInit(seed, rank, worker_log)
        self.made = torch.zeros(max(workers, 1), dtype=torch.int64).share_memory_()
        self.taken = 0
        self.train_samples = SeededSamples(train, seed, rank, True, self.made)
        self.val_samples = SeededSamples(val, seed, rank, False, torch.zeros_like(self.made))
        self.sampler = GlobalOrderSampler(len(train), world, rank, data.shuffle, seed, data.drop_last)
        self._stream: Iterator[Batch | UserError] | None = None
        self._next = (0, 0)  # epoch and position at which the stream stands
        self._val_loader: DataLoader[Any] | None = None
        self._check_sizes(len(train), len(val))

    @property
    def global_batch(self) -> int:
        """Samples of one batch over all ranks."""
        return int(self.data.batch_size) * self.world

    def batches(self, start: int = 0) -> int:
        """Batches left in an epoch from this position."""
        self.sampler.set_epoch(self.sampler.epoch, start)
        return TrainingBatches(self.sampler, self.data.batch_size, 0, 0, 1).batches(len(self.sampler))

    def train(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Batch]:
        """The batches of an epoch from a position on, at most ``limit`` of them."""
        if self._stream is None or self._next != (epoch, start):
            self.close_training()
            self._stream = self._open(epoch, start)
        count = self.batches(start)
        count = count if limit is None else min(count, limit)
        for batch in to_device(self._host(count), self.device, self.clock):
            self._next = (epoch, batch.end) if batch.number < batch.last else (epoch + 1, 0)
            # Draws in the training process (dropout, mixup) belong to this batch, whatever was drawn before.
            seeding.seed_all(self.seed, seeding.STEP, epoch, batch.number, self.rank)
            yield batch
        if not self.data.persistent_workers:
            self.close_training()

    def validation(self) -> Iterator[Batch]:
        """Each validation sample once over all ranks; the ranks' numbers of batches may differ by one."""
        if self._val_loader is None:
            keys = ValidationBatches(len(self.val_samples), self.data.batch_size, self.world, self.rank)
            self._val_loader = self._loader(self.val_samples, keys, persistent=self.data.persistent_workers)
        return to_device(map(_checked, self._val_loader), self.device, self.clock)

    def ready(self) -> int | None:
        """Batches that lie ready; None without workers."""
        return sum(self.made.tolist()) - self.taken if self.workers else None

    def close_training(self) -> None:
        """End the training's workers."""
        self._stream = None
        self.made.zero_()
        self.taken = 0

    def close(self) -> None:
        """End all workers."""
        self.close_training()
        self._val_loader = None

    def _host(self, count: int) -> Iterator[Batch]:
        assert self._stream is not None
        for _ in range(count):
            ready = self.ready()
            batch = _checked(next(self._stream))
            self.taken += 1
            batch.ready = ready
            yield batch

    def _open(self, epoch: int, start: int) -> Iterator[Batch | UserError]:
        last = self.epochs if self.data.persistent_workers else epoch + 1
        keys = TrainingBatches(self.sampler, self.data.batch_size, epoch, start, last)
        return iter(self._loader(self.train_samples, keys, persistent=False))

    def _loader(self, samples: SeededSamples, keys: Sampler[BatchKey], persistent: bool) -> DataLoader[Any]:
        accelerated = self.device.type != "cpu"
        wants_pinned = self.data.pin_memory
        more: dict[str, Any] = {}
        if self.workers:
            more = {
                "prefetch_factor": self.data.prefetch_factor,
                "persistent_workers": persistent,
                "multiprocessing_context": self.data.start_method,
                "worker_init_fn": self.init,
            }
        return DataLoader(
            samples,
            batch_sampler=keys,  # type: ignore[arg-type]  # a key stands for a list of indices
            collate_fn=samples.collate,  # type: ignore[arg-type]  # takes what __getitems__ gave
            num_workers=self.workers,
            pin_memory=accelerated if wants_pinned is None else wants_pinned and accelerated,
            generator=torch.Generator().manual_seed(self.seed),  # else it would draw from the training's own stream
            **more,
        )

    def _check_sizes(self, train: int, val: int) -> None:
        if val == 0:
            raise UserError("the validation set is empty: give data.path a val/ folder or raise data.val_fraction")
        if train == 0 or self.batches() == 0:
            raise SettingsError(
                "data.batch_size",
                self.data.batch_size,
                f"at most {train // self.world} with data.drop_last: {train} training samples do not fill one batch of "
                f"{self.data.batch_size} x {self.world} processes. Or set data.drop_last=false",
            )


def _checked(batch: Batch | UserError) -> Batch:
    if isinstance(batch, UserError):
        raise batch
    return batch
