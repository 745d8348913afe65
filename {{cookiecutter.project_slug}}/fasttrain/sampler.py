"""The order of the samples, and each rank's part of it.

An epoch is one global order of all samples, drawn from (seed, epoch). Rank r takes every world-size-th sample of it,
so the k-th batches of all ranks together are the k-th global batch, whatever the number of processes, and "how far
the epoch has come" is one number: the position in the global order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from fasttrain import seeding


class BatchKey(NamedTuple):
    """What a loader worker is asked for."""

    epoch: int
    number: int  # of the batch within the epoch
    last: int  # number of the epoch's last batch
    end: int  # position in the epoch's global order once this batch is done on all ranks
    indices: list[int]  # of this rank's samples


class GlobalOrderSampler(Sampler[int]):
    """The contract of ``torch.utils.data.DistributedSampler``, and a position to start from.

    Args:
        size: samples in the data set.
        num_replicas, rank: processes, and which of them this is.
        shuffle: a new order each epoch; otherwise 0, 1, 2, ...
        drop_last: leave out the samples at the end that don't go round all replicas; otherwise fill up from the
        beginning.
    """

    def __init__(
        self,
        size: int,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is not within 0..{num_replicas - 1}")
        self.size, self.num_replicas, self.rank = size, num_replicas, rank
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch; ``start`` samples of its global order are taken as done."""
        self.epoch, self.start = epoch, start

    def indices(self) -> np.ndarray:
        """This rank's part of what is left of the epoch, int64, in order."""
        if self.shuffle:
            order = seeding.permutation(self.size, self.seed, seeding.ORDER, self.epoch)
        else:
            order = np.arange(self.size)
        left = order[self.start :]
        over = len(left) % self.num_replicas
        if over and self.drop_last:
            left = left[: len(left) - over]
        elif over:
            left = np.concatenate([left, np.resize(order, self.num_replicas - over)])
        return left[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices().tolist())

    def __len__(self) -> int:
        return self.left(self.start)

    def left(self, start: int) -> int:
        """How many samples this rank has left of an epoch from this position."""
        return batch_count(self.size - start, self.num_replicas, self.drop_last)


class TrainingBatches(Sampler[BatchKey]):
    """The batches of this rank from (first_epoch, start) to the end of the training, epoch after epoch without a stop.

    Since it goes on by itself, loader workers prepare the next epoch while validation or the last batches run.
    """

    def __init__(self, sampler: GlobalOrderSampler, batch_size: int, first_epoch: int, start: int, epochs: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        self.first_epoch, self.start, self.epochs = first_epoch, start, epochs

    def __iter__(self) -> Iterator[BatchKey]:
        global_batch = self.batch_size * self.sampler.num_replicas
        for epoch in range(self.first_epoch, self.epochs):
            start = self.start if epoch == self.first_epoch else 0
            self.sampler.set_epoch(epoch, start)
            indices = self.sampler.indices()
            first, count = start // global_batch, batch_count(len(indices), self.batch_size, self.sampler.drop_last)
            for i in range(count):
                end = min(start + (i + 1) * global_batch, self.sampler.size)
                chunk = indices[i * self.batch_size : (i + 1) * self.batch_size].tolist()
                yield BatchKey(epoch, first + i, first + count - 1, end, chunk)


def batch_count(samples: int, size: int, drop_last: bool) -> int:
    """How many batches of this size so many samples make."""
    return samples // size if drop_last else -(-samples // size)


class ValidationBatches(Sampler[BatchKey]):
    """Each sample exactly once over all ranks: no filling up, so that a rank may have a batch less, or none."""

    def __init__(self, size: int, batch_size: int, num_replicas: int = 1, rank: int = 0) -> None:
        self.mine, self.batch_size = range(rank, size, num_replicas), batch_size

    def __iter__(self) -> Iterator[BatchKey]:
        for number in range(len(self)):
            chunk = self.mine[number * self.batch_size : (number + 1) * self.batch_size]
            yield BatchKey(0, number, len(self) - 1, 0, list(chunk))

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch_size)
