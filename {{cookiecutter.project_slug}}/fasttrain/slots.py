"""Slots: batches in memory that the loader workers and the training process share, allocated before the workers start.

A worker writes its samples straight into its next slot and sends only the slot's number; the training process looks
the batch up. That saves what a finished batch costs otherwise: a new block of shared memory, its page faults and, on
CUDA, a further copy into pinned memory, since slots are registered as pinned once.

When a slot is written again: a worker has `prefetch_factor` batches in work or lying ready besides the one that was
taken last, and PyTorch asks for a further one while it hands over the next. So with SPARE = 2 slots more than that, a
batch stays whole until the next but one is asked for: on a CPU the loop may use it until then, and on CUDA, where
copies run one batch ahead, its copy must have passed by then (`transfer.ahead` sees to it).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from loguru import logger

from fasttrain import host
from fasttrain.errors import UserError

SPARE = 2  # slots a worker has besides those that it fills ahead
_ALIGNED = 64  # bytes; each field of a slot begins on a cache line


class Misfit(UserError):
    """A sample of another shape or type than the first one."""


class Field(NamedTuple):
    """One item of a sample: shape and NumPy type."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.shape else str(self.dtype)


_NUMBERS = {
    bool: Field((), np.dtype(np.bool_)),
    int: Field((), np.dtype(np.int64)),
    float: Field((), np.dtype(np.float64)),
}


def field_of(value: Any) -> Field | None:
    """The field of an array, tensor or number, with the type that default_collate gives it; None of all else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad:
            return None
        try:
            return Field(tuple(value.shape), value.numpy().dtype)
        except TypeError:  # bfloat16 and others that NumPy has no name for
            return None
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            torch.from_numpy(np.empty(0, value.dtype))
        except (TypeError, ValueError):  # text, objects, foreign byte order
            return None
        return Field(value.shape, value.dtype)
    for kind, field in _NUMBERS.items():
        if isinstance(value, kind):
            return field
    if is_later(value):
        return Field(tuple(value.shape), value.dtype)
    return None


def is_later(value: Any) -> bool:
    """Whether it is yet to be made, see `worker.Later`."""
    return hasattr(value, "write") and hasattr(value, "shape") and hasattr(value, "dtype")


def fields_of(sample: Any) -> tuple[Field, ...] | str:
    """The fields of a sample, or the reason, as the end of a sentence, why slots can't hold it."""
    if type(sample) not in (tuple, list):
        return f"a sample is a {type(sample).__name__}, not a tuple"
    fields = []
    for place, value in enumerate(sample):
        if (field := field_of(value)) is None:
            return f"item {place} of a sample is a {type(value).__name__} that has no fixed shape or NumPy type"
        fields.append(field)
    return tuple(fields) or "a sample is empty"


class Pinning(Protocol):
    """Registers memory with the device driver, so that it is copied while the device computes."""

    def pin(self, address: int, size: int) -> None:
        """Raises RuntimeError where the driver refuses."""

    def unpin(self, address: int) -> None: ...


class CudaPinning:
    """CUDA's (or ROCm's) own."""

    def pin(self, address: int, size: int) -> None:
        result = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(result) != 0:
            raise RuntimeError(f"cudaHostRegister gave {result}")

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # it fails only where the context is gone, and the pinning too


class Shared:
    """Memory that this process and those it starts see, however they are started. It has no name that could be left.

    On Linux an anonymous file, which isn't bound by the size of /dev/shm; elsewhere torch's own shared memory.

    Raises:
        UserError: less is free.
    """

    def __init__(self, size: int, what: str) -> None:
        self.size = size
        self._fd = -1
        try:
            self._fd = os.memfd_create("fasttrain-slots")
        except (AttributeError, OSError):  # another system, or a sandbox that forbids it
            free, where = _free_in("/dev/shm"), "in /dev/shm"
        else:
            used, total = host.memory()
            free, where = total - used, "of memory"
        if size > free:
            raise UserError(
                f"{what} take {size / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB {where} are free: lower data.workers, "
                "data.prefetch_factor or data.batch_size"
            )
        if self._fd < 0:
            self.bytes = torch.empty(size, dtype=torch.uint8).share_memory_()
        else:
            os.ftruncate(self._fd, size)
            self._map()

    def _map(self) -> None:
        weakref.finalize(self, os.close, self._fd)
        self.bytes = torch.frombuffer(mmap.mmap(self._fd, self.size), dtype=torch.uint8)

    def __getstate__(self) -> dict[str, Any]:  # on the way to a worker that is not forked
        if self._fd < 0:
            return {"size": self.size, "_fd": -1, "bytes": self.bytes}
        from multiprocessing.reduction import DupFd  # Windows has none, nor anonymous files

        return {"size": self.size, "_fd": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "bytes" not in state:
            self._fd = state["_fd"].detach()
            self._map()


class Slots:
    """All slots of one loader.

    Args:
        fields: of a sample.
        batch_size: rows of a slot.
        workers: loader processes; 0: the training process itself.
        prefetch: batches that each worker prepares ahead.
        pinning: None leaves the memory pageable.

    Raises:
        UserError: they don't fit in memory.
    """

    def __init__(
        self, fields: Sequence[Field], batch_size: int, workers: int, prefetch: int, pinning: Pinning | None = None
    ) -> None:
        self.fields, self.batch_size = tuple(fields), batch_size
        self.each = (prefetch if workers else 0) + SPARE
        self.starts, self.slot_size = [], 0
        for field in self.fields:
            self.starts.append(self.slot_size)
            self.slot_size += -(-self._bytes(field) // _ALIGNED) * _ALIGNED
        count = self.each * max(workers, 1)
        what = f"{count} batches in shared memory ({self.each} for each of {max(workers, 1)} loader processes)"
        self.memory = Shared(max(1, self.slot_size * count), what)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}
        self._written = 0  # batches begun by this worker
        self.pinned = pinning is not None and self._pin(pinning)

    def tensors(self, worker: int, slot: int, size: int) -> tuple[torch.Tensor, ...]:
        """The first `size` samples of a slot, as views."""
        whole = self._whole(worker * self.each + slot)
        return whole if size == self.batch_size else tuple(tensor[:size] for tensor in whole)

    def next(self, worker: int) -> Slot:
        """The slot that this worker fills next."""
        number = self._written % self.each
        self._written += 1
        return Slot(number, self.fields, [t.numpy() for t in self._whole(worker * self.each + number)])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": {}}

    def _bytes(self, field: Field) -> int:
        return int(np.prod(field.shape, dtype=np.int64)) * field.dtype.itemsize * self.batch_size

    def _whole(self, number: int) -> tuple[torch.Tensor, ...]:
        if number not in self._views:
            views = []
            for field, start in zip(self.fields, self.starts, strict=True):
                begin = number * self.slot_size + start
                part = self.memory.bytes[begin : begin + self._bytes(field)]
                dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
                views.append(part.view(dtype).view(self.batch_size, *field.shape))
            self._views[number] = tuple(views)
        return self._views[number]

    def _pin(self, pinning: Pinning) -> bool:
        address = self.memory.bytes.data_ptr()
        try:
            pinning.pin(address, self.memory.size)
        except RuntimeError as error:
            size = f"{self.memory.size / 1e6:,.0f} MB"
            logger.warning(f"{size} of batches can't be pinned, so copies don't overlap with compute: {error}")
            return False
        end = weakref.finalize(self.memory, pinning.unpin, address)
        end.atexit = False  # the driver may be gone by then, and the memory goes with the process
        return True


class Slot:
    """A slot being filled, sample by sample."""

    def __init__(self, number: int, fields: tuple[Field, ...], arrays: list[np.ndarray]) -> None:
        self.number, self.fields, self.arrays = number, fields, arrays
        self.count = 0

    def put(self, sample: Any, index: int) -> None:
        """Take in the sample: what is yet to be made (`worker.Later`) is made in its place, the rest is copied.

        Raises:
            Misfit: it has another shape or type than the first sample, which decided what a slot is.
            UserError: an item can't be made.
        """
        if not isinstance(sample, (tuple, list)) or len(sample) != len(self.fields):
            found = f"{len(sample)} items" if isinstance(sample, (tuple, list)) else f"a {type(sample).__name__}"
            raise Misfit(f"sample {index} is {found}; the first sample was a tuple of {len(self.fields)} items")
        for place, (value, array, field) in enumerate(zip(sample, self.arrays, self.fields, strict=True)):
            write = getattr(value, "write", None)
            if write is not None or type(value) is np.ndarray:
                own: Field | None = Field(value.shape, value.dtype)
            else:
                own = _NUMBERS.get(type(value)) or field_of(value)
            if own != field and (write is not None or not _fits(own, field)):
                raise Misfit(
                    f"sample {index}: item {place} is {own or type(value).__name__}, but the first sample's is "
                    f"{field}: in data.py crop or pad all samples to one shape, and give them one type"
                )
            if write is None:
                array[self.count] = value
            else:
                write(array[self.count])
        self.count += 1


def _fits(found: Field | None, field: Field) -> bool:
    return found is not None and found.shape == field.shape and np.can_cast(found.dtype, field.dtype, "safe")


def _free_in(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except (AttributeError, OSError):  # not Linux: no such limit
        return 1 << 62
    return found.f_bavail * found.f_frsize
