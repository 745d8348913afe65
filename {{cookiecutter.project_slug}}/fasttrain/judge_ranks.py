"""Several ranks: who is late, who waits for whom, and what the sums over the ranks cost.

Every step ends for all ranks together, in the sum of the gradients. So a rank that is late spends longer in phases that
wait for nobody, and the others spend that time waiting: in the backward pass, or in the forward pass where buffers are
broadcast or batch statistics summed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from fasttrain import judge_data
from fasttrain.evidence import SURE, Side, ms, percent, sure_above
from fasttrain.findings import Finding
from fasttrain.records import BatchRecord

LATE = 0.10  # part of the step that the others wait for one rank
TOGETHER = 8  # steps
HABIT = 0.75  # of those groups of steps in which the same rank is late
SUMS = 0.30  # part of the step that goes to the sums over the ranks
ALONE = ("wait", "copy", "optimizer", "other")  # phases that wait for no other rank


def find(sides: Sequence[Side], settings: Mapping[str, Any]) -> list[Finding]:
    """A late rank, ranks that take turns in being late, or sums that take long."""
    if len(sides) < 2:
        return []
    steps = _steps(sides)
    if len(steps) < 16:
        return []
    walls = [fmean(record.wall for record in step) for step in steps]
    found = _late_rank(sides, steps, settings)
    if not found:
        found = _stragglers(sides, steps, walls)
    return [*found, *_communication(sides, steps, walls, settings)]


def _steps(sides: Sequence[Side]) -> list[list[BatchRecord]]:
    """The batches that all ranks have, each with its ranks' records in the order of `sides`."""
    keyed: list[dict[tuple[int, int, int, int], BatchRecord]] = []
    for side in sides:
        counts: Counter[tuple[int, int, int]] = Counter()
        by_key = {}
        for record in side.records:
            # A resumed training does some steps again. Counted from its end, since a rank may miss a start that failed.
            restarts = sum(start >= record.time for start in side.starts)
            step = restarts, record.epoch, record.step
            by_key[(*step, counts[step])] = record
            counts[step] += 1  # batches of one step, where gradients accumulate
        keyed.append(by_key)
    common = [key for key in keyed[0] if all(key in other for other in keyed[1:])]
    return [[by_key[key] for by_key in keyed] for key in common]


def _alone(record: BatchRecord) -> float:
    """Seconds in phases that wait for nobody."""
    return float(sum(getattr(record, phase) for phase in ALONE))


def _late_rank(sides: Sequence[Side], steps: list[list[BatchRecord]], settings: Mapping[str, Any]) -> list[Finding]:
    """One rank is late in most steps: by what it does alone, or by its forward pass with a backward pass to match."""
    # A loader that is short gives its workers' batches in bursts: a few steps are looked at together.
    size = max(1, min(TOGETHER, len(steps) // 8))
    groups = [steps[at : at + size] for at in range(0, len(steps) - size + 1, size)]
    for name, measure in (("alone", _alone), ("forward", lambda record: record.forward)):
        sums = [sum(measure(step[i]) for step in steps) for i in range(len(sides))]
        worst = max(range(len(sides)), key=lambda i: sums[i])
        lateness, spans = [], []
        for group in groups:
            own = sum(measure(step[worst]) for step in group)
            others = median(sum(measure(step[i]) for step in group) for i in range(len(sides)) if i != worst)
            waited = max(
                sum(fmean(getattr(r, phase) for i, r in enumerate(step) if i != worst) for step in group)
                - sum(getattr(step[worst], phase) for step in group)
                for phase in (("backward", "forward") if name == "alone" else ("backward",))
            )
            lateness.append(max(0.0, min(own - others, waited)))
            spans.append(sum(fmean(record.wall for record in step) for step in group))
        share, sure = sure_above(lateness, spans, LATE)
        habit = fmean(late > 0.02 * span for late, span in zip(lateness, spans, strict=True))
        if sure >= SURE and habit >= HABIT:
            return [_slow_rank(sides, worst, name, share, min(sure, 0.5 + habit / 2), habit, settings)]
    return []


def _slow_rank(
    sides: Sequence[Side], worst: int, name: str, share: float, sure: float, habit: float, settings: Mapping[str, Any]
) -> Finding:
    side, others = sides[worst], [each for i, each in enumerate(sides) if i != worst]
    phases = ALONE if name == "alone" else ("forward",)
    more = {phase: side.mean(phase) - fmean(each.mean(phase) for each in others) for phase in phases}
    phase = max(more, key=lambda each: more[each])
    own, usual = side.mean(phase), fmean(each.mean(phase) for each in others)
    theirs = fmean(each.mean("backward") for each in others)
    why = ""
    remedy = f"compare rank {side.number}'s device and cores with the others' (clock, temperature, who shares it)"
    if phase == "wait":
        data = judge_data.find(side, settings)
        why = f": {data[0].says}" if data else ": its loader"
        remedy = (
            f"on rank {side.number}: {data[0].remedy}" if data else f"look at the disk and cores of rank {side.number}"
        )
    elif phase in ("other", "optimizer"):
        looks = [look for look in side.looks if look.phase == phase]
        why = f": {looks[0].own}" if looks else ""
        remedy = f"take what rank {side.number} alone does there out of the loop"
    return Finding(
        "slow_rank",
        share,
        sure,
        f"rank {side.number} is late and the others wait for it; it spends longer in {phase}{why}",
        f"rank {side.number}'s {phase} takes {ms(own)} a batch, the others' {ms(usual)}; they wait {percent(share)} of "
        f"the time for it, which shows in their backward pass ({ms(theirs)} against its "
        f"{ms(side.mean('backward'))}); it is the late one in {percent(habit)} of the steps",
        f"{remedy}; up to {percent(share)} less time a step",
        side.number,
    )


def _stragglers(sides: Sequence[Side], steps: list[list[BatchRecord]], walls: list[float]) -> list[Finding]:
    """In each step some rank waits for data and the others for it, but not always the same one."""
    waits = [max(record.wait for record in step) - min(record.wait for record in step) for step in steps]
    share, sure = sure_above(waits, walls, LATE)
    own = max(side.part("wait") for side in sides)
    if sure < SURE or share < 1.5 * own:  # else the waits of each say it already
        return []
    return [
        Finding(
            "stragglers",
            share,
            sure,
            "the ranks take turns in waiting for data, and the others wait for that one",
            f"no rank waits more than {percent(own)} of the time, but in each step one does: {percent(share)} together",
            "data.prefetch_factor: raise it, so that hiccups are evened out on each rank",
        )
    ]


def _communication(
    sides: Sequence[Side], steps: list[list[BatchRecord]], walls: list[float], settings: Mapping[str, Any]
) -> list[Finding]:
    """What the sums over the ranks take of a step, when nobody is late any more."""
    if any(record.backward_cpu is None for record in steps[0]):
        return []  # a device's times tell its computing and its waiting for a sum together
    queued = {side.number: side.thread[2] / side.thread[0] if side.thread else 0.0 for side in sides}
    sums = []
    for step in steps:
        last = []
        for side, record in zip(sides, step, strict=True):
            # The thread sleeps while it waits for the sum; what it stood in the queue for a core is not that.
            asleep = record.backward - (record.backward_cpu or 0.0) - queued[side.number] * record.wall
            last.append(max(0.0, asleep))
        sums.append(min(last))
    share, sure = sure_above(sums, walls, SUMS)
    if sure < SURE:
        return []
    accumulate = int((settings.get("train") or {}).get("accumulate") or 1)
    return [
        Finding(
            "communication",
            share,
            sure,
            "summing the gradients over the ranks takes a large part of the step",
            f"{ms(sum(sums) / len(sums))} of {ms(fmean(walls))} a batch is spent in the backward pass waiting for the "
            f"sum even by the rank that comes last, {percent(share)}",
            f"train.accumulate: {accumulate} -> {4 * accumulate} sums a quarter as often: about "
            f"{percent(share * 0.75)} less time; a larger data.batch_size; a faster network, or a compressing hook "
            "(bf16_compress_hook) in train.py",
        )
    ]
