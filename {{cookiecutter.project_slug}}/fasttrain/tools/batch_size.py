"""Whether a batch of some size fits, and how fast it is: one step tried in this process, short memory handled."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from fasttrain import host
from fasttrain.transfer import Batch

PART = 0.9  # of the device's memory that a step may take: the rest is for what other steps need
PART_OF_HOST = 0.7  # on a CPU: memory that has run out there can't be caught, the kernel ends a process
SECONDS = 1.0


class Sizes:
    """Called with a batch size, gives images a second of the step; None where memory is short.

    Args:
        step: a whole training step on a batch.
        batch: a batch of this data set; its samples are repeated.
        processes: training processes that share this host's memory.
    """

    def __init__(self, step: Callable[[Batch], int], batch: Batch, device: torch.device, processes: int) -> None:
        self.step, self.batch, self.device, self.processes = step, batch, device, processes
        self.peaks: dict[int, int] = {}  # the most bytes in memory, by batch size, on a CPU
        self.before = most_used()

    def __call__(self, size: int) -> float | None:
        if self.device.type == "cpu" and self._too_large(size):
            return None
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            speed = self._speed(size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            speed = None
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            short = torch.cuda.max_memory_reserved(self.device) > PART * total
            return None if short else speed
        self.peaks[size] = most_used()
        return speed

    def _speed(self, size: int) -> float:
        tensors = tuple(repeated(tensor, size) for tensor in self.batch.tensors)
        large = Batch(tensors, [0] * size, 0, 0, 0, 0, 0.0, None)
        for _ in range(2):
            self.step(large)
        self._settle()
        began, calls = time.perf_counter(), 0
        while calls < 2 or time.perf_counter() - began < SECONDS:
            self.step(large)
            calls += 1
        self._settle()
        return size * calls / (time.perf_counter() - began)

    def _too_large(self, size: int) -> bool:
        """Foretold from the sizes tried so far, before anything is allocated."""
        if not self.peaks:
            return False  # the size in the settings
        largest = max(self.peaks)
        used, total = host.memory()
        return (
            foretold(self.before, self.peaks[largest], largest, size) > PART_OF_HOST * (total - used) / self.processes
        )

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


def foretold(before: int, peak: int, size: int, larger: int) -> float:
    """Bytes that a batch of `larger` samples will add, from what `size` samples added; a quarter on top."""
    return 1.25 * max(0, peak - before) * larger / size


def repeated(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The samples again and again, (size, ...)."""
    times = -(-size // len(tensor))
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:size]


def out_of_memory(error: RuntimeError) -> bool:
    """Whether that is what an error of any device says."""
    kind: Any = getattr(torch, "OutOfMemoryError", ())
    return isinstance(error, kind) or "out of memory" in str(error).lower()


def most_used() -> int:
    """The most bytes that this process ever had in memory."""
    if os.name == "nt":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
