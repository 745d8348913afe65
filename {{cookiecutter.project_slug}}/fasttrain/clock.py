"""The clock of the device: moments that can be marked without waiting, and the time between two of them."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Stamp = Any  # a moment: seconds on the host, an event on a device


class Clock(Protocol):
    """What the stopwatch needs of a device; a stand-in plays it in the tests."""

    def stamp(self) -> Stamp:
        """Mark this moment in the device's queue of work. Never waits."""

    def passed(self, stamp: Stamp) -> bool:
        """Whether the device has come to this moment. Never waits."""

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        """Time from one passed moment to another; negative if end came first."""

    def settle(self) -> None:
        """Wait until the device has done all its work. For pauses (validation, saving), never in a step."""


class HostClock:
    """For a CPU, and for devices whose work can't be timed without waiting for it (MPS)."""

    def stamp(self) -> Stamp:
        return time.perf_counter()

    def passed(self, stamp: Stamp) -> bool:
        return True

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        return float(end - begin)

    def settle(self) -> None:
        return None


class CudaClock:
    """Events on the current stream of a CUDA (or ROCm) device; marking one costs about 2 us of host time."""

    def stamp(self) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, stamp: Stamp) -> bool:
        return bool(stamp.query())

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize()


def clock_of(device: torch.device) -> Clock:
    """The clock that fits the device."""
    return CudaClock() if device.type == "cuda" else HostClock()
