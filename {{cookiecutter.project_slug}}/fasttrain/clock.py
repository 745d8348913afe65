"""The clock of the device: moments that can be marked without waiting, and the time between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable
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
    """For a CPU, whose work is done when the call returns.

    It serves Apple's devices, too: their events can tell a time only after waiting for all the device's work. What the
    host sees there is when it started an operation; the device's time falls to the phase in which the host waits for
    it, which is mostly `optimizer`, where the gradients are looked at.

    Args:
        synchronize: waits for the device, where there is one.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize

    stamp = staticmethod(time.perf_counter)

    def passed(self, stamp: Stamp) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        if self._synchronize is not None:
            self._synchronize()


class EventClock:
    """Events on the current stream of a CUDA or ROCm device; marking one costs about 2 us of host time.

    Args:
        make: a new event that keeps the time.
        synchronize: waits for the device.
    """

    def __init__(self, make: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        self._make, self._synchronize = make, synchronize

    def stamp(self) -> Stamp:
        event = self._make()
        event.record()
        return event

    def passed(self, stamp: Stamp) -> bool:
        return bool(stamp.query())

    def seconds(self, begin: Stamp, end: Stamp) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        self._synchronize()


def clock_of(device: torch.device) -> Clock:
    """The clock that fits the device."""
    if device.type == "cuda":
        return EventClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize)
    if device.type == "mps":
        return HostClock(torch.mps.synchronize)
    return HostClock()
