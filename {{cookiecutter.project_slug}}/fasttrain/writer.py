"""One save at a time, behind the training: the loop takes a snapshot and goes on, a thread waits for the saver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from fasttrain import saver
from fasttrain.slots import CudaPinning
from fasttrain.snapshot import Saver, Skeleton, Snapshot, is_finite

Answers = dict[str, dict[str, Any]]


class Writer:
    """Writes checkpoints into a folder.

    Args:
        folder: the run directory. What a killed process left there half written is removed.
        device: that trains; on CUDA the memory of the snapshots is pinned.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.pinning = CudaPinning() if device.type == "cuda" else None
        self._snapshot: Snapshot | None = None
        self._saver: Saver | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        for left in folder.glob(".*.pt.*.tmp"):
            left.unlink(missing_ok=True)

    @property
    def busy(self) -> bool:
        """A save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, content: Mapping[str, Any]) -> int:
        """Have memory and process ready for contents of this size, in the background. Returns the bytes."""
        size = Skeleton(content).size
        self._start(lambda: self._make(size))
        return size

    def save(
        self, content: Mapping[str, Any], files: Sequence[tuple[str, str | None]], done: Callable[[Answers], None]
    ) -> None:
        """Take a snapshot and return; the files are then written. Waits for a save that is under way.

        Where memory is short, it is written before this returns.

        Args:
            files: names, each with the name that the file there before is kept under, or None.
            done: called in another thread when that is over, with `Saver.write`'s answers.
        """
        skeleton = Skeleton(content)
        self.wait()
        if self._snapshot is None or self._snapshot.size < skeleton.size:
            self._make(skeleton.size)
        if self._snapshot is None or self._saver is None:
            if not all(map(is_finite, skeleton.tensors)):
                done(_refused(files))
                return
            sizes = [size for _, size in skeleton.records]
            done(saver.answer(str(self.folder), files, skeleton.bytes, sizes, skeleton.contents))
            return
        self._snapshot.take(skeleton)
        kinds = [tensor.dtype for tensor in skeleton.tensors]
        skeleton.tensors = []  # they are the training's
        snapshot, write = self._snapshot, self._saver.write

        def work() -> None:
            good = snapshot.is_finite(skeleton.records, kinds)
            done(write(self.folder, files, skeleton) if good else _refused(files))

        self._start(work)

    def wait(self) -> None:
        """Until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:  # a fault of the code
            error, self._error = self._error, None
            raise error

    def close(self, patience: float) -> None:
        """Wait for a save under way, but no longer than `patience` seconds, and end the process."""
        if self._thread is not None:
            self._thread.join(patience)
        if self._saver is not None:
            self._saver.close()
        if self._thread is not None:
            self._thread.join(patience)
        self._snapshot = self._saver = None

    def _make(self, size: int) -> None:
        if self._saver is not None:
            self._saver.close()
        self._snapshot = self._saver = None
        try:
            self._snapshot = Snapshot(size, self.pinning)
        except MemoryError as error:
            logger.warning(f"no memory to save behind the training ({error}): each save holds it up")
            return
        self._saver = Saver(self._snapshot)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised where the training next waits
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()


def _refused(files: Sequence[tuple[str, str | None]]) -> Answers:
    return {name: {"error": "there is NaN or infinity in it"} for name, _ in files}
