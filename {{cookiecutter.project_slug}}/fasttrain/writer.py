"""One save at a time, behind the training: the loop takes a snapshot and goes on, a thread waits for the saver."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from fasttrain import saver
from fasttrain.slots import CudaPinning
from fasttrain.snapshot import Skeleton, Snapshot, not_finite

Answers = dict[str, dict[str, Any]]


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
        try:
            if self.process is None or self.process.poll() is not None:  # killed, by the system short of memory say
                self._start(self.snapshot.fd)
        except OSError as refused:
            return {name: {"error": f"no process to save with can be started: {refused.strerror}"} for name, _ in files}
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
        clear(folder, self.process.pid)
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
        clear(folder)

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
        self,
        content: Mapping[str, Any],
        files: Sequence[tuple[str, str | None]],
        done: Callable[[Answers], None],
        infinite: Container[str] = (),
    ) -> None:
        """Take a snapshot and return; the files are then written. Waits for a save that is under way.

        Where memory is short, it is written before this returns.

        Args:
            files: names, each with the name that the file there before is kept under, or None.
            done: called in another thread when that is over, with `Saver.write`'s answers.
            infinite: names of tensors that may hold infinity. With NaN, or infinity elsewhere, nothing is written.
        """
        skeleton = Skeleton(content)
        self.wait()
        if self._snapshot is None or self._snapshot.size < skeleton.size:
            self._make(skeleton.size)
        if self._snapshot is None or self._saver is None:
            if (wrong := not_finite(skeleton.names, skeleton.tensors, infinite)) is not None:
                done(_refused(files, wrong))
                return
            sizes = [size for _, size in skeleton.records]
            done(saver.answer(str(self.folder), files, skeleton.bytes, sizes, skeleton.contents))
            return
        self._snapshot.take(skeleton)
        skeleton.tensors = []  # they are the training's
        snapshot, write = self._snapshot, self._saver.write

        def work() -> None:
            wrong = not_finite(skeleton.names, snapshot.tensors(skeleton), infinite)
            done(write(self.folder, files, skeleton) if wrong is None else _refused(files, wrong))

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
            snapshot = Snapshot(size, self.pinning)
            self._snapshot, self._saver = snapshot, Saver(snapshot)
        except (MemoryError, OSError) as error:  # of memory, processes or open files
            logger.warning(f"no means to save behind the training ({error}): each save holds it up")

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised where the training next waits
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()


def clear(folder: Path, process: int | None = None) -> None:
    """Remove the half-written files of this saver, or of all."""
    try:
        for left in folder.glob(f".*.pt.{process or '*'}.tmp"):
            left.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(f"{folder}: half-written checkpoints can't be removed ({error.strerror})")


def _refused(files: Sequence[tuple[str, str | None]], wrong: str) -> Answers:
    return {name: {"error": f"there is {wrong}"} for name, _ in files}
