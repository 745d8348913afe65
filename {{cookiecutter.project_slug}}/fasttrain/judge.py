"""The verdict: what holds a training back, from its records alone. Pure arithmetic: no clock, no files, no torch.

evidence.py puts the records in order; each judge_*.py finds causes of one kind. A finding is made only where the
evidence is sure: shares are compared with limits by the spread between parts of the series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fasttrain import judge_data, judge_growth, judge_ranks, judge_step
from fasttrain.evidence import LEAST, LEAST_SECONDS, Side, percent, side_of
from fasttrain.findings import CAUSES as CAUSES
from fasttrain.findings import Finding as Finding
from fasttrain.history import Rank

NOTES = ("other_processes",)  # true, but nothing that the training does: after all others


@dataclass(frozen=True)
class Verdict:
    """What was found, the costliest first. Nothing found and ``enough`` means: nothing holds this training back."""

    findings: tuple[Finding, ...]
    enough: bool  # False: not enough evidence to judge
    says: str  # the verdict in one sentence
    busy: float | None = None  # part of the wall time in which the step computed, 0 to 1

    def lines(self) -> list[str]:
        """For people: each finding with its evidence and its remedy."""
        text = [f"verdict: {self.says}"]
        for finding in self.findings:
            cost = f"costs {percent(finding.share)}, " if finding.share else ""
            where = "" if finding.rank is None else f"rank {finding.rank}: "
            if finding is not self.findings[0]:
                text.append(f"also: {where}{finding.says}")
            text += [f"  {cost}sure {percent(finding.sure)}: {finding.evidence}", f"  do: {finding.remedy}"]
        return text


def judge(ranks: Sequence[Rank], settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Verdict:
    """Judge these records.

    Args:
        ranks: the records of a window, or of a whole run, and the events of the run.
        settings: config.yaml as the run saved it. facts: run.json.
    """
    sides = [side_of(rank) for rank in ranks]
    judged = [side for side in sides if side.enough]
    if not judged:
        return Verdict((), False, _too_little(sides))
    every = judge_ranks.find(judged, settings)
    for side in judged:
        found = [*judge_growth.find(side), *judge_data.find(side, settings), *judge_step.find(side, settings)]
        every += [finding if len(judged) == 1 else finding.at(side.number) for finding in found]
    findings = tuple(sorted(_once(every, len(judged)), key=lambda finding: -_weight(finding)))
    busy = sum(side.part(phase) for side in judged for phase in ("forward", "backward", "optimizer")) / len(judged)
    return Verdict(findings, True, _says(findings, busy), busy)


def _weight(finding: Finding) -> float:
    """Order of the findings: by cost; growth before small costs; notes last."""
    if finding.cause in NOTES:
        return finding.share - 1
    if finding.cause == "slow_rank":
        return 1 + finding.share
    return finding.share if finding.share > 0 else finding.weight


def _once(findings: Sequence[Finding], ranks: int) -> list[Finding]:
    """One finding a cause: the costliest; of all ranks (None) if every one has it."""
    by_cause: dict[str, list[Finding]] = {}
    for finding in findings:
        by_cause.setdefault(finding.cause, []).append(finding)
    result = []
    for same in by_cause.values():
        worst = max(same, key=lambda finding: finding.share)
        result.append(worst.at(None) if ranks > 1 and len(same) == ranks else worst)
    return result


def _says(findings: Sequence[Finding], busy: float) -> str:
    if not findings:
        return f"nothing holds this training back: {percent(busy)} of the time goes to computing"
    first = findings[0]
    where = "" if first.rank is None else f"rank {first.rank}: "
    return f"{where}{first.says}"


def _too_little(sides: Sequence[Side]) -> str:
    batches = max((len(side.records) for side in sides), default=0)
    seconds = max((side.wall for side in sides), default=0.0)
    return (
        f"not enough evidence yet: {batches} batches in {seconds:.1f} s after the warm-up, "
        f"at least {LEAST} in {LEAST_SECONDS:.0f} s are needed"
    )
