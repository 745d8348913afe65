"""Feeding the training: data set -> loader workers -> batches on the device.

The data set is the user's: ``__getitem__(index)`` gives a tuple of arrays and numbers of fixed shape. Workers run it
with every draw seeded by (seed, epoch, index), so that neither their number nor that of the processes changes what is
learnt (worker.py). The DataLoader carries small messages; the batches lie in shared slots (slots.py).
"""

from __future__ import annotations

import atexit
import copy
import math
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from loguru import logger
from torch.utils.data import DataLoader, Sampler

from fasttrain import loader, machine, seeding
from fasttrain.clock import Clock, clock_of
from fasttrain.errors import SettingsError, UserError
from fasttrain.logs import WorkerLog
from fasttrain.sampler import BatchKey, GlobalOrderSampler, TrainingBatches, ValidationBatches, batch_count
from fasttrain.skips import Skips
from fasttrain.slots import CudaPinning, Field, Slots, fields_of
from fasttrain.transfer import Batch, CudaStreams, leaves, to_device
from fasttrain.worker import Failed, MapDataset, Samples, WorkerInit, as_it_is

PROBES = 64  # samples that are tried for one that can be read, which decides what a slot is


class Feed:
    """Gives the batches of an epoch, and those of validation, on the device.

    Args:
        train, val: data sets; a sample is a tuple of arrays and numbers of fixed shape.
        data: the section ``data`` of the settings.
        workers: loader processes of this rank.
        epochs: of the whole training.
        worker_log: logging of the loader workers (logs.WorkerLog).
        timeout: seconds to wait for a batch before the training ends.
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
        timeout: float = math.inf,
    ) -> None:
        self.timeout = timeout
        self.data, self.workers, self.epochs = data, workers, epochs
        self.seed, self.rank, self.world, self.device = seed, rank, world, device
        self.clock: Clock = clock_of(device)
        self.init = WorkerInit(seed, rank, worker_log)
        self.made = torch.zeros(max(workers, 1), dtype=torch.int64).share_memory_()
        self._made = memoryview(self.made.numpy())  # the same numbers, read a good deal faster
        self.taken = 0
        self.train_samples = Samples(train, seed, rank, True, data.on_error, self.made)
        self.val_samples = Samples(val, seed, rank, False, data.on_error, torch.zeros_like(self.made))
        self.sampler = GlobalOrderSampler(len(train), world, rank, data.shuffle, seed, data.drop_last)
        self.train_skips = Skips("training", len(self.sampler))
        self.val_skips = Skips("validation", len(range(rank, len(val), world)))
        self._stream: Iterator[Any] | None = None
        self._next = (0, 0)  # epoch and position at which the stream stands
        self._val_loader: DataLoader[Any] | None = None
        self._unfit: str | None = None  # why batches are handed over without slots
        self._event: Callable[..., None] | None = None
        self._check_sizes(len(train), len(val))
        atexit.register(_close, weakref.ref(self))  # before multiprocessing sends the workers a signal, a slow end

    @cached_property
    def streams(self) -> CudaStreams | None:
        """Made once, since PyTorch keeps memory for each stream that was ever used."""
        return CudaStreams(self.device) if self.device.type == "cuda" else None

    @property
    def global_batch(self) -> int:
        """Samples of one batch over all ranks."""
        return int(self.data.batch_size) * self.world

    def batches(self, start: int = 0) -> int:
        """Batches left in an epoch from this position."""
        return batch_count(self.sampler.left(start), self.data.batch_size, self.data.drop_last)

    def train(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Batch]:
        """The batches of an epoch from a position on, at most ``limit`` of them."""
        if self._stream is None or self._next != (epoch, start):
            self.close_training()
            self._stream = self._open(epoch, start)
        count = self.batches(start)
        count = count if limit is None else min(count, limit)
        stem = seeding.mix(self.seed, seeding.STEP, epoch)
        for batch in to_device(self._host(count), self.device, self.clock, self.streams):
            # Draws in the training process (dropout, mixup) belong to this batch, whatever was drawn before.
            seeding.seed_all(batch.number, self.rank, start=stem, device=self.device)
            yield batch
        if not self.data.persistent_workers:
            self.close_training()

    def validation(self) -> Iterator[Batch]:
        """Each validation sample once over all ranks; the ranks' numbers of batches may differ by one.

        Samples that can't be read are missing (``data.on_error: skip``), and so is a batch of nothing else.
        """
        if self._val_loader is None:
            keys = ValidationBatches(len(self.val_samples), self.data.batch_size, self.world, self.rank)
            self._val_loader = self._loader(self.val_samples, keys, persistent=self.data.persistent_workers)
        self.val_skips.begin(0)
        source = loader.again(self._val_loader, self.timeout)
        loaded = loader.batches(source, self.val_samples, self.val_skips, self._told, self.timeout)
        return (batch for batch in to_device(loaded, self.device, self.clock, self.streams) if batch.size)

    def names(self, indices: list[int]) -> list[str]:
        """The file names of these training samples; none where the data set knows none. Reads the files."""
        original = getattr(self.train_samples.dataset, "original", None)
        try:
            found = [] if original is None else [getattr(original(index)[0], "name", "") for index in indices]
        except UserError:  # one of them can't be read
            return []
        return [name for name in found if name]

    def tell(self, event: Callable[..., None]) -> None:
        """Where events about skipped samples and the loader itself go: `records.Recorder.event`."""
        self.train_skips.event = self.val_skips.event = self._event = event

    def ready(self) -> int | None:
        """Batches that lie ready; None without workers."""
        return sum(self._made) - self.taken if self.workers else None

    def close_training(self) -> None:
        """End the training's workers."""
        loader.end_workers(self._stream)
        self._stream = None
        self.made.zero_()
        self.taken = 0

    def close(self) -> None:
        """End all workers and give back the slots."""
        self.close_training()
        loader.end_workers(getattr(self._val_loader, "_iterator", None))
        self._val_loader = None
        self.train_samples.slots = self.val_samples.slots = None

    def _host(self, count: int) -> Iterator[Batch]:
        assert self._stream is not None
        batches = loader.batches(self._stream, self.train_samples, self.train_skips, self._told, self.timeout)
        for _ in range(count):
            ready = self.ready()
            batch = next(batches)
            self.taken += 1
            batch.ready = ready
            if self._event is not None:
                self._describe(batch, self._event)
                self._event = None
            self._next = (batch.epoch, batch.end) if batch.number < batch.last else (batch.epoch + 1, 0)
            yield batch

    def _describe(self, batch: Batch, event: Callable[..., None]) -> None:
        """What the verdict has to know of the loader, said once, with the first batch."""
        slots, tensors = self.train_samples.slots, list(leaves(batch.tensors))
        event(
            "loader",
            workers=self.workers,
            slots=slots is not None,
            why_no_slots=self._unfit,
            pinned=slots.pinned if slots is not None else all(tensor.is_pinned() for tensor in tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            types=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            stored=getattr(self.train_samples.dataset, "stored", None),
            device=self.device.type,
            ranks=self.world,
            **machine.limits(),
        )

    def _told(self, failed: Failed) -> UserError:
        """The error that a worker met, with what to do."""
        rank = f"rank {self.rank}: " if self.world > 1 else ""
        error = UserError(f"{rank}{failed.text}")
        error.exit_code = failed.exit_code
        return error

    def _open(self, epoch: int, start: int) -> Iterator[Any]:
        last = self.epochs if self.data.persistent_workers else epoch + 1
        keys = TrainingBatches(self.sampler, self.data.batch_size, epoch, start, last)
        return iter(self._loader(self.train_samples, keys, persistent=False))

    def _loader(self, samples: Samples, keys: Sampler[BatchKey], persistent: bool) -> DataLoader[Any]:
        wants_pinned = self.data.pin_memory is not False and self.device.type == "cuda"
        if samples.slots is None:
            samples.slots = self._slots(samples, wants_pinned)
        more: dict[str, Any] = {}
        if self.workers:
            more = {
                "timeout": min(loader.LOOK, self.timeout),
                "prefetch_factor": self.data.prefetch_factor,
                "persistent_workers": persistent,
                "multiprocessing_context": self.data.start_method,
                "worker_init_fn": self.init,
            }
        return DataLoader(
            samples,
            batch_sampler=keys,  # type: ignore[arg-type]  # a key stands for a list of indices
            collate_fn=as_it_is,
            num_workers=self.workers,
            pin_memory=wants_pinned and samples.slots is None,
            generator=torch.Generator().manual_seed(self.seed),  # else it would draw from the training's own stream
            **more,
        )

    def _slots(self, samples: Samples, pinned: bool) -> Slots | None:
        """Slots for these samples, if a first one shows that they fit."""
        if self._unfit is not None:
            return None
        fields = _probe(samples.dataset, self.seed)
        if isinstance(fields, str):
            self._unfit = fields
            logger.info(f"batches are handed over through new shared memory each, which is slower: {fields}")
            return None
        pinning = CudaPinning() if pinned else None
        return Slots(fields, self.data.batch_size, self.workers, self.data.prefetch_factor, pinning)

    def _check_sizes(self, train: int, val: int) -> None:
        if val == 0:
            raise UserError("the validation set is empty: give data.path a val/ folder or raise data.val_fraction")
        if train == 0:
            raise UserError("the training set is empty: look at data.path")
        if self.batches() == 0:
            raise SettingsError(
                "data.batch_size",
                self.data.batch_size,
                f"at most {train // self.world} with data.drop_last: {train} training samples do not fill one batch of "
                f"{self.data.batch_size} x {self.world} processes. Or set data.drop_last=false",
            )


def _close(feed: weakref.ref[Feed]) -> None:
    if (left_open := feed()) is not None:
        left_open.close()


def _probe(dataset: MapDataset, seed: int) -> tuple[Field, ...] | str:
    """The fields of a sample, or why slots can't hold it.

    Made by a copy of the data set: a file or database that it opens on first use is then not open when workers fork.

    Raises:
        UserError: none of the first samples can be read.
    """
    probed = copy.copy(dataset)
    count = min(PROBES, len(dataset))
    for index in range(count):
        seeding.seed_all(seed, seeding.SAMPLE, 0, index)
        try:
            return fields_of(probed[index])
        except UserError as error:
            last = error
    raise UserError(f"none of the first {count} samples can be read: {last}")
