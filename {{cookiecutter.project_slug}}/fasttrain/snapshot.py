"""A training's state copied into host memory, from where another process writes it: saving costs the loop a copy.

`Skeleton` takes a dictionary apart into its tensors and a small pickle of the rest, in the form of `torch.save`;
`Snapshot` holds the memory, allocated and touched once, that the tensors are copied to.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch._utils
from loguru import logger

from fasttrain import host, saver
from fasttrain.slots import Pinning

PIECE = 32 << 20  # bytes touched at a time
LEGACY = {  # the names that torch.save has for types of storage; other types are saved in its newer way
    torch.float32: torch.FloatStorage,
    torch.float64: torch.DoubleStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


class _Stored(NamedTuple):
    """Stands for the contents of a tensor in the pickle."""

    kind: type
    number: int
    elements: int


class Skeleton(pickle.Pickler):
    """A dictionary without its tensors' contents.

    Attributes:
        tensors: flat, in the order of their numbers; a tensor that stands under two names has one.
        names, kinds: for each the name it stands under, the first of them, and its dtype.
        records: for each where it begins in a snapshot, and its bytes.
        bytes: the pickle.
        size: of the snapshot.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: it holds what has no place in a checkpoint.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=2)  # as torch.save, and all that weights_only reads
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.kinds: list[torch.dtype] = []
        self.records: list[tuple[int, int]] = []
        self.size = 0
        self._numbers: dict[Any, int] = {}
        self._name = ""
        self.dump(dict(content))
        self.bytes = self._buffer.getvalue()

    def contents(self) -> Iterator[Any]:
        """The tensors as they are now, as buffers of bytes on the host."""
        for tensor in self.tensors:
            yield tensor.cpu().view(torch.uint8).numpy().data

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is str:  # asked for everything in its order: a tensor comes after its name
            self._name = obj
        return ("storage", obj.kind, str(obj.number), "cpu", obj.elements) if type(obj) is _Stored else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        tensor = obj.detach()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        number = self._number(tensor)
        layout: tuple[Any, ...] = (0, tuple(tensor.shape), tensor.stride(), False, OrderedDict())
        if tensor.dtype in LEGACY:
            return torch._utils._rebuild_tensor_v2, (_Stored(LEGACY[tensor.dtype], number, tensor.numel()), *layout)
        stored = _Stored(torch.UntypedStorage, number, tensor.numel() * tensor.element_size())
        return torch._utils._rebuild_tensor_v3, (stored, *layout, tensor.dtype)

    def _number(self, tensor: torch.Tensor) -> int:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in self._numbers or tensor.numel() == 0:
            self._numbers[key] = len(self.tensors)
            # Dense memory in whatever order of axes, channels_last say: one block to copy.
            self.tensors.append(tensor.as_strided((tensor.numel(),), (1,)))
            self.names.append(self._name)
            self.kinds.append(tensor.dtype)
            size = tensor.numel() * tensor.element_size()
            self.records.append((self.size, size))
            self.size += -(-size // saver.ALIGNED) * saver.ALIGNED
        return self._numbers[key]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory without gaps or overlaps, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(p for p in zip(tensor.stride(), tensor.shape, strict=True) if p[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Snapshot:
    """Host memory for the tensors of a checkpoint, which the saver sees as a file.

    Anonymous (memfd) on Linux, elsewhere a bytearray, which only this process sees. Made in any thread; touching every
    page, and on CUDA pinning them, takes about as long as two copies.

    Raises:
        MemoryError: less is free.
    """

    def __init__(self, size: int, pinning: Pinning | None = None) -> None:
        self.size = max(1, size)
        used, total = host.memory()
        if self.size > total - used:
            raise MemoryError(f"{size / 1e6:,.0f} MB are wanted, {(total - used) / 1e6:,.0f} MB are free")
        self.fd: int | None = None
        try:
            self.fd = os.memfd_create("fasttrain-checkpoint")
        except (AttributeError, OSError):  # another system, or a sandbox that forbids it
            self.memory: Any = bytearray(self.size)
        else:
            weakref.finalize(self, os.close, self.fd)
            os.ftruncate(self.fd, self.size)
            self.memory = mmap.mmap(self.fd, self.size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        for begin in range(0, self.size, PIECE):  # page faults now, not in the first save
            self.bytes[begin : begin + PIECE].zero_()
        if pinning is not None:
            address = self.bytes.data_ptr()
            try:
                pinning.pin(address, self.size)
            except RuntimeError as error:
                logger.warning(
                    f"{self.size / 1e6:,.0f} MB for checkpoints can't be pinned, saves pause longer: {error}"
                )
            else:
                end = weakref.finalize(self, pinning.unpin, address)
                end.atexit = False  # the driver may be gone by then, and the memory goes with the process

    def take(self, skeleton: Skeleton) -> None:
        """Copy the tensors as they are now. On return the training may change them."""
        for tensor, (start, size) in zip(skeleton.tensors, skeleton.records, strict=True):
            place = self.bytes[start : start + size].view(tensor.dtype)
            place.copy_(tensor, non_blocking=tensor.device.type == "cuda")  # pinned: all queued, then one wait
        for device in {tensor.device for tensor in skeleton.tensors if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def tensors(self, skeleton: Skeleton) -> Iterator[torch.Tensor]:
        """What was taken, flat, in the order of their numbers."""
        for kind, (start, size) in zip(skeleton.kinds, skeleton.records, strict=True):
            yield self.bytes[start : start + size].view(kind)


def not_finite(names: Iterable[str], tensors: Iterable[torch.Tensor], infinite: Container[str]) -> str | None:
    """What must not be saved: "NaN in conv1.weight". Reads every tensor once. None: all is well.

    Args:
        infinite: names of those that may hold infinity.
    """
    for name, tensor in zip(names, tensors, strict=True):
        if not is_finite(tensor):
            if is_nan(tensor):
                return f"NaN in {name}"
            if name not in infinite:
                return f"infinity in {name}"
    return None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Without a mask as large as the tensor."""
    return all(map(math.isfinite, _extremes(tensor)))


def is_nan(tensor: torch.Tensor) -> bool:
    """Whether a number is NaN."""
    return any(map(math.isnan, _extremes(tensor)))


def _extremes(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return ()
    return tuple(torch.aminmax(tensor))  # NaN if there is one
