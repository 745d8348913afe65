"""Batches on their way to the device.

On CUDA the copy of the next batch runs on a stream of its own while the device computes on this one. It overlaps only
from pinned memory. Elsewhere there is nothing to overlap: on a CPU a batch stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from fasttrain.clock import Clock, Stamp
from fasttrain.effort import Effort, Usage


class Bad(NamedTuple):
    """A sample that could not be read: its place in the data set, and why (with the file's name)."""

    number: int
    text: str


@dataclass(slots=True)
class Batch:
    """What the loader hands over.

    tensors is the user's sample, batched: a tuple of tensors whose first dimension is the sample (or what
    default_collate made of it). On a CPU they are the memory that the loader workers write to: they are valid until the
    next but one batch is asked for, or another round of batches begins. What is to live longer has to be cloned.
    """

    tensors: Any
    indices: list[int]  # of the samples in the data set; of the replacements, where some were bad
    epoch: int
    number: int  # within the epoch
    last: int  # number of the epoch's last batch
    end: int  # position in the epoch's global order once this batch is done on all ranks
    made: float  # seconds that the worker took for it
    worker: int | None  # None: made in the training process
    ready: int | None = None  # batches that were ready in the loader when this one was asked for
    copied: tuple[Stamp, Stamp] | None = None  # when its copy to the device began and ended
    slot: int | None = None  # of this worker's slots (slots.py); None: the tensors came with the batch
    bad: list[Bad] = field(default_factory=list)  # samples that were replaced, or in validation left out
    effort: Effort | None = None  # what making it cost the worker
    usage: Usage | None = None  # now and then: what the worker holds

    @property
    def size(self) -> int:
        return len(self.indices)

    def pin_memory(self) -> Batch:
        """Called by the DataLoader, in its pin-memory thread."""
        self.tensors = pin_memory(self.tensors)
        return self


class Streams(Protocol):
    """The part of a device's stream API that copying ahead needs; a stand-in plays it in the tests."""

    def copy(self, tensors: Any) -> tuple[Any, Stamp, Stamp]:
        """Start copying on the side stream; the stamps are taken there, before and after."""

    def hand_over(self, tensors: Any, copied: Stamp) -> None:
        """Make the computing stream wait for the copy, on the device, and keep the memory until it has been used."""

    def wait(self, copied: Stamp) -> None:
        """Make the host wait for the copy."""


class CudaStreams:
    """Streams of one CUDA (or ROCm) device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.side = device, torch.cuda.Stream(device)

    def copy(self, tensors: Any) -> tuple[Any, Stamp, Stamp]:
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True, blocking=True)  # should the host wait, then without a busy core
        with torch.cuda.stream(self.side):
            began.record()
            moved = move(tensors, self.device)
            ended.record()
        return moved, began, ended

    def hand_over(self, tensors: Any, copied: Stamp) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)
        for tensor in leaves(tensors):
            # Its memory came from the side stream: not to be reused before this one is done.
            tensor.record_stream(stream)

    def wait(self, copied: Stamp) -> None:
        copied.synchronize()


def ahead(batches: Iterable[Batch], streams: Streams) -> Iterator[Batch]:
    """Hand over each batch once the copy of the one after it is under way.

    The host only queues work, with one exception: before a batch is asked for, the copy of the last but one before it
    must have passed, since its slot may then be written again (slots.py). Its step was handed over long ago, so this
    does not wait unless copying is what limits the training.
    """
    source = iter(batches)
    copies: deque[Stamp] = deque()  # not known to have passed
    waiting: Batch | None = None
    try:
        while True:
            while len(copies) > 1:
                streams.wait(copies.popleft())
            batch = next(source, None)
            if batch is not None:
                batch.tensors, *stamps = streams.copy(batch.tensors)
                batch.copied = (stamps[0], stamps[1])
                copies.append(stamps[1])
            if waiting is not None:
                streams.hand_over(waiting.tensors, waiting.copied[1])  # type: ignore[index]
                yield waiting
            if batch is None:
                return
            waiting = batch
    finally:
        for copied in copies:  # whatever comes next may begin with any slot
            streams.wait(copied)


def plain(batches: Iterable[Batch], device: torch.device, clock: Clock) -> Iterator[Batch]:
    """Copy in the host's time, for devices without streams of their own here (MPS, XPU). Waits for the copy."""
    for batch in batches:
        began = clock.stamp()
        batch.tensors = move(batch.tensors, device, non_blocking=False)
        batch.copied = (began, clock.stamp())
        yield batch


def to_device(
    batches: Iterable[Batch], device: torch.device, clock: Clock, streams: Streams | None = None
) -> Iterator[Batch]:
    """The batches, on the device, copied in the way that suits it; ``streams`` if it has them."""
    if device.type == "cpu":
        return iter(batches)
    if streams is not None:
        return ahead(batches, streams)
    return plain(batches, device, clock)


def move(tensors: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Tensors in tuples, lists or dictionaries to the device; what is no tensor stays."""
    if isinstance(tensors, torch.Tensor):
        return tensors.to(device, non_blocking=non_blocking)
    if isinstance(tensors, dict):
        return {key: move(value, device, non_blocking) for key, value in tensors.items()}
    if isinstance(tensors, (tuple, list)):
        moved = [move(value, device, non_blocking) for value in tensors]
        return type(tensors)(*moved) if hasattr(tensors, "_fields") else type(tensors)(moved)  # a named tuple, or not
    return tensors


def leaves(tensors: Any) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists or dictionaries."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, dict):
        for value in tensors.values():
            yield from leaves(value)
    elif isinstance(tensors, (tuple, list)):
        for value in tensors:
            yield from leaves(value)
