"""The same with workers that stay and prefetch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers import torchvision
from benchmarks.work import Work

NEEDS = torchvision.NEEDS


def batches(work: Work) -> Iterator[Any]:
    return torchvision.batches(work, tuned=True)
