"""A training's state copied into host memory, from where another process writes it: saving costs the loop a copy.

`Skeleton` takes a dictionary apart into its tensors and a small pickle of the rest, in the form of `torch.save`;
`Snapshot` holds the memory, allocated and touched once, that the tensors are copied to; `Saver` is this side of the
process that writes (saver.py).
"""

from __future__ import annotations

import functools
import io
import json
import math
import mmap
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
        self.records: list[tuple[int, int]] = []
        self.size = 0
        self._numbers: dict[Any, int] = {}
        self.dump(dict(content))
        self.bytes = self._buffer.getvalue()

    def contents(self) -> Iterator[Any]:
        """The tensors as they are now, as buffers of bytes on the host."""
        for tensor in self.tensors:
            yield tensor.cpu().view(torch.uint8).numpy().data

    def persistent_id(self, obj: Any) -> Any:
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

    def is_finite(self, records: Sequence[tuple[int, int]], kinds: Sequence[torch.dtype]) -> bool:
        """Whether there is neither NaN nor infinity in it. Reads it once; from the thread that waits for the saver."""
        pieces = (self.bytes[start : start + size] for start, size in records)
        return all(is_finite(piece.view(kind)) for piece, kind in zip(pieces, kinds, strict=True))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. Without a mask as large as the tensor."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, most = torch.aminmax(tensor)  # NaN if there is one
    return math.isfinite(least) and math.isfinite(most)


class Saver:
    """The process that writes. Where it can't be used (no memfd), a thread of this process writes itself.

    Must be called from one thread at a time.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.process: subprocess.Popen[bytes] | None = None
        self._given_up = threading.Event()
        if snapshot.fd is not None:
            self._start(snapshot.fd)

    def _start(self, fd: int) -> None:
        command = [sys.executable, "-I", "-S", saver.__file__, str(os.getpid()), str(fd), str(self.snapshot.size)]
        # Not multiprocessing: the same whatever the start method is, and nothing of CUDA is forked.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,))

    def write(
        self, folder: Path, files: Sequence[tuple[str, str | None]], skeleton: Skeleton
    ) -> dict[str, dict[str, Any]]:
        """Write the snapshot under these names, each with the name that the file there before is kept under, or None.

        Waits for the disk. Never raises for it: for each name the answer is ``bytes`` and ``seconds``, or ``error``.
        """
        records = skeleton.records
        if self.snapshot.fd is None:
            contents = functools.partial(saver.pieces, self.snapshot.memory, records)
            return saver.answer(str(folder), files, skeleton.bytes, [n for _, n in records], contents, self._alive)
        request = {"folder": str(folder), "files": files, "records": records, "skeleton": len(skeleton.bytes)}
        if self.process is None or self.process.poll() is not None:  # killed, by the system short of memory say
            self._start(self.snapshot.fd)
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n" + skeleton.bytes)
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:  # a broken pipe
            line = b""
        if line:
            answer: dict[str, dict[str, Any]] = json.loads(line)
            return answer
        error = f"the saver (process {self.process.pid}) ended with {self.process.wait()}"
        return {name: {"error": error} for name, _ in files}

    def close(self) -> None:
        """End the process; what it was writing is given up."""
        self._given_up.set()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _alive(self) -> None:
        if self._given_up.is_set():
            raise OSError("given up, since the training ended")
