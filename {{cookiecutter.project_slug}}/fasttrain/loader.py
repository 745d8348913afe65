"""What the DataLoader gives: waited for with a limit, its failures as one line each, its batches in their slots."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from fasttrain.errors import UserError
from fasttrain.skips import Skips
from fasttrain.transfer import Batch
from fasttrain.worker import Failed, Samples, lost_worker

LOOK = 5.0  # seconds between two looks whether the workers live, while a batch is waited for


def again(loader: DataLoader[Any], timeout: float) -> Iterator[Any]:
    """``iter(loader)``, which waits for workers that stay: as long as for a batch, not only from look to look."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is None:
        return iter(loader)
    iterator._timeout = timeout if math.isfinite(timeout) else 0  # 0: without end
    try:
        return iter(loader)
    except RuntimeError as error:
        if str(error).startswith("DataLoader timed out"):
            raise _too_late(timeout) from None
        raise
    finally:
        iterator._timeout = loader.timeout


def end_workers(iterator: Any) -> None:
    """End them now: left to its destructor, an iterator that the frames of an exception hold would outlive the run."""
    shutdown = getattr(iterator, "_shutdown_workers", None)  # PyTorch has no public name for it
    if shutdown is not None:
        shutdown()


def batches(
    source: Iterator[Any], samples: Samples, skips: Skips, told: Callable[[Failed], UserError], timeout: float
) -> Iterator[Batch]:
    """What the DataLoader gives, with the tensors looked up in their slots, and its failures as one line each.

    PyTorch's ``__next__`` opens a span for its profiler around each batch. In a training whose steps are long, so that
    its code has left the CPU's caches by then, that takes 0.3 ms, a third of the wait for a batch that lies ready.
    """
    fetch = getattr(source, "_next_data", source.__next__)  # the docstring says why
    while True:
        try:
            got = _next(fetch, timeout)
        except StopIteration:
            return
        except (RuntimeError, OSError) as error:
            if (lost := lost_worker(error)) is None:
                raise
            raise lost from error
        if isinstance(got, Failed):
            raise told(got)
        skips.take(got.epoch, got.bad, got.number == got.last)
        if got.slot is not None and samples.slots is not None:
            got.tensors = samples.slots.tensors(got.worker or 0, got.slot, got.size)
        yield got


def _next(fetch: Callable[[], Any], timeout: float) -> Any:
    """The next of the DataLoader, which by its own timeout only looks whether the workers live."""
    until = time.monotonic() + timeout
    while True:
        try:
            return fetch()
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            if time.monotonic() >= until:
                raise _too_late(timeout) from None


def _too_late(timeout: float) -> UserError:
    return UserError(
        f"no batch came from the loader workers within {timeout:g} s (run.timeout): does the disk or server behind "
        "data.path answer?"
    )
