"""The verdict: what holds a training back, from its records alone. Pure arithmetic: no clock, no files, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain.history import Rank


@dataclass(frozen=True)
class Finding:
    """One thing that costs time, or will end badly."""

    cause: str  # one of CAUSES
    share: float  # part of the wall time that it costs, 0 to 1; 0 for growth of memory and the like
    sure: float  # 0 to 1
    says: str  # one sentence: what limits
    evidence: str  # the numbers it rests on
    remedy: str  # the exact change, such as "data.workers: 2 -> 6", and the gain to expect
    rank: int | None = None  # the rank it is about; None for all


@dataclass(frozen=True)
class Verdict:
    """What was found, the costliest first. Nothing found and ``enough`` means: nothing holds this training back."""

    findings: tuple[Finding, ...]
    enough: bool  # False: not enough evidence to judge
    says: str  # the verdict in one sentence
    busy: float | None = None  # part of the wall time in which the step computed, 0 to 1


CAUSES: tuple[str, ...] = ()


def judge(ranks: Sequence[Rank], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Verdict:
    """Judge these records.

    Args:
        ranks: the records of a window, or of a whole run, and the events of the run.
        settings: config.yaml as the run saved it. facts: run.json.
    """
    return Verdict((), False, "not enough evidence yet")
