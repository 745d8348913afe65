"""The verdict on trainings on paper: each cause is named, also where there is more of it; healthy ones are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulated import Made, Training, gauges, looks, pauses

from fasttrain import history
from fasttrain.evidence import SURE, percent
from fasttrain.history import Rank
from fasttrain.judge import CAUSES, Verdict, judge
from fasttrain.judge_ranks import HABIT

SETTINGS: dict[str, Any] = {
    "data": {"path": "photos", "workers": 2, "prefetch_factor": 4, "val_fraction": 0.1, "persistent_workers": True},
    "train": {"accumulate": 1},
    "optimizer": {"name": "adamw"},
    "checkpoint": {"every_minutes": 0.01},
}


def verdict(*ranks: Rank) -> Verdict:
    return judge(ranks, SETTINGS, {})


def first(found: Verdict) -> str:
    return found.findings[0].cause if found.findings else "nothing"


# ---- faults, each by how much there is of it: 1 is just clear, 4 is gross


def _made(**fields: Any) -> Callable[[int, int], Made]:
    return lambda batch, worker: Made(**fields)


def no_workers(much: float) -> list[Rank]:
    return [Training(workers=0, made=_made(cpu=0.01 * much)).rank()]


def few_workers(much: float) -> list[Rank]:
    return [Training(workers=1, cores=16, made=_made(cpu=0.035 * much)).rank()]


def transforms(much: float) -> list[Rank]:
    return [Training(cores=2, made=_made(cpu=0.075 * much, slowest=0.003)).rank()]


def disk(much: float) -> list[Rank]:
    return [Training(made=_made(cpu=0.01, asleep=0.07 * much)).rank()]


def jitter(much: float) -> list[Rank]:
    def made(batch: int, worker: int) -> Made:
        slow = 0.25 * much if batch % 7 == 3 else 0.0
        return Made(cpu=0.008, asleep=slow, tail=slow, slowest=max(slow, 0.001))

    return [Training(prefetch=2, made=made).rank()]


def epoch_start(much: float) -> list[Rank]:
    return [Training(epoch=20, stall=0.2 * much, made=_made(cpu=0.02)).rank()]


def slow_worker(much: float) -> list[Rank]:
    return [Training(made=lambda batch, worker: Made(cpu=0.09 * much if worker == 1 else 0.02)).rank()]


def collate(much: float) -> list[Rank]:
    return [Training(made=_made(cpu=0.08 * much, assembly=0.06 * much)).rank()]


def quota(much: float) -> list[Rank]:
    return [Training(workers=8, cores=1, made=_made(cpu=0.04, queued=0.25 * much)).rank()]


def throttled(much: float) -> list[Rank]:
    rank = Training(cores=2, loader=(("quota", 2.0),), made=_made(cpu=0.03, asleep=0.04 * much)).rank()
    gauges(rank, throttled=lambda second: 0.4 * second)
    return [rank]


def hand_over(much: float) -> list[Rank]:
    unfit = (("slots", False), ("why_no_slots", "a sample is a dict, not a tuple"))
    rank = Training(workers=2, loader=unfit).rank()
    slower = [r._replace(wait=r.wait + 0.006 * much, wall=r.wall + 0.006 * much) for r in rank.records]
    return [Rank(0, slower, rank.events)]


def pinning(much: float) -> list[Rank]:
    loader = (("pinned", False), ("device", "cuda"))
    return [Training(copy=0.006 * much, loader=loader, backward_cpu=None, behind=3).rank()]


def copy_type(much: float) -> list[Rank]:
    loader = (("types", ["float32", "int64"]), ("device", "cuda"))
    return [Training(copy=0.006 * much, loader=loader, backward_cpu=None, behind=3).rank()]


def copy(much: float) -> list[Rank]:
    return [Training(copy=0.006 * much, loader=(("device", "cuda"),), backward_cpu=None, behind=3).rank()]


def tiny_kernels(much: float) -> list[Rank]:
    rank = Training(backward_cpu=0.011).rank()
    rank.events.append({"time": 5.2, "event": "graph", "operations": round(1500 * much)})
    return [rank]


def tiny_kernels_on_a_device(much: float) -> list[Rank]:
    rank = Training(backward_cpu=None, behind=0, loader=(("device", "cuda"),)).rank()
    rank.events.append({"time": 5.2, "event": "graph", "operations": round(1000 * much)})
    return [rank]


def optimizer(much: float) -> list[Rank]:
    return [Training(optimizer=0.02 * much).rank()]


def logging(much: float) -> list[Rank]:
    rank = Training(batches=400, other=0.006 * much).rank()
    looks(rank, min(0.9, 0.2 * much), "logging")
    return [rank]


def logging_before_the_optimizer(much: float) -> list[Rank]:
    rank = Training(batches=400, optimizer=0.015 * much).rank()
    looks(rank, min(0.9, 0.3 * much), "logging", phase="optimizer")
    return [rank]


def checkpoint(much: float) -> list[Rank]:
    rank = Training(batches=400).rank()
    pauses(rank, "checkpoint", every=1.0, seconds=0.2 * much)
    return [rank]


def saving_in_the_loop(much: float) -> list[Rank]:
    rank = Training(batches=400, other=0.006 * much).rank()
    looks(rank, min(0.9, 0.2 * much), "saving")
    return [rank]


def validation(much: float) -> list[Rank]:
    rank = Training(batches=400).rank()
    pauses(rank, "validation", every=2.0, seconds=1.2 * much)
    return [rank]


def other(much: float) -> list[Rank]:
    return [Training(other=0.008 * much).rank()]


def slow_rank(much: float) -> list[Rank]:
    """Rank 1 computes longer in its forward pass; rank 0 waits in its backward pass."""
    late = 0.008 * much
    return [Training(backward=0.012 + late, backward_cpu=0.011).rank(0), Training(forward=0.012 + late).rank(1)]


def slow_rank_by_data(much: float) -> list[Rank]:
    def wait_for_it(batch: int, phases: dict[str, float]) -> None:
        phases["backward"] += 0.025 * much

    slow = Training(made=_made(cpu=0.01, asleep=0.08 + 0.05 * (much - 1)))
    fast = Training(made=_made(cpu=0.01), step=wait_for_it)
    return [fast.rank(0), slow.rank(1)]


def stragglers(much: float) -> list[Rank]:
    def late(number: int) -> Rank:
        rank = Training().rank(number)
        late = [
            r._replace(
                wait=r.wait + (0.006 * much if i % 4 == number else 0.0),
                backward=r.backward + (0.0 if i % 4 == number else 0.006 * much),
                wall=r.wall + 0.006 * much,
                ready=0,
            )
            for i, r in enumerate(rank.records)
        ]
        return Rank(number, late, rank.events)

    return [late(number) for number in range(4)]


def communication(much: float) -> list[Rank]:
    return [Training(backward=0.012 + 0.02 * much, local_ranks=2).rank(number) for number in range(2)]


def memory(much: float) -> list[Rank]:
    rank = Training(batches=500).rank()
    gauges(
        rank, private=lambda second: 4e8 + 2e7 * much * second, memory_used=lambda _: 8e9, memory_total=lambda _: 1e10
    )
    return [rank]


def memory_of_a_worker(much: float) -> list[Rank]:
    rank = Training(batches=500).rank()
    for second in range(12):
        use = {"worker": 1, "pid": 77, "private": 3e8 + 1e7 * much * second, "open_files": 20}
        rank.events.append({"time": 5.6 + second, "event": "worker", **use})
    return [rank]


def files(much: float) -> list[Rank]:
    rank = Training(batches=500).rank()
    gauges(rank, open_files=lambda second: 20 + 6 * much * second)
    return [rank]


def other_processes(much: float) -> list[Rank]:
    rank = Training(batches=300).rank()
    for second in range(1, 7):
        event = {"time": 6.0 + second, "event": "looks", "looks": 20, "seconds": 1.0, "cpu": 0.3, "at": []}
        rank.events.append({**event, "queued": min(0.7, 0.4 * much)})
    gauges(rank, cpu=lambda _: 99.0, process_cpu=lambda second: 0.3 * second)
    return [rank]


FAULTS: dict[Callable[[float], list[Rank]], str] = {
    fault: fault.__name__
    for fault in (
        no_workers, few_workers, transforms, disk, jitter, epoch_start, slow_worker, collate, quota, hand_over,
        pinning, copy_type, copy, tiny_kernels, optimizer, logging, checkpoint, validation, other, slow_rank,
        stragglers, communication, memory, files, other_processes,
    )
}  # fmt: skip
FAULTS.update(
    {
        throttled: "quota",
        tiny_kernels_on_a_device: "tiny_kernels",
        logging_before_the_optimizer: "logging",
        saving_in_the_loop: "checkpoint",
        slow_rank_by_data: "slow_rank",
        memory_of_a_worker: "memory",
    }
)


LEAST_SURE = {"slow_rank": 0.5 + HABIT / 2}  # its habit counts, too; for all others the limit of any finding


@pytest.mark.parametrize("much", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize(("fault", "cause"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_cause_comes_first_and_more_of_it_keeps_it_there(
    fault: Callable[[float], list[Rank]], cause: str, much: float
) -> None:
    found = verdict(*fault(much))
    assert first(found) == cause, "\n".join(found.lines())
    top = found.findings[0]
    assert top.sure >= LEAST_SURE.get(cause, SURE)
    assert top.says
    assert top.evidence
    assert top.remedy
    assert 0 <= top.share <= 1


def test_every_cause_has_a_training_that_shows_it() -> None:
    assert set(FAULTS.values()) == set(CAUSES)


# ---- healthy ones


HEALTHY = {
    "compute-bound": Training(),
    "balanced": Training(made=_made(cpu=0.042, slowest=0.002)),
    "tiny model": Training(
        batches=3000,
        forward=0.0002,
        backward=0.0002,
        optimizer=0.00015,
        backward_cpu=0.0002,
        made=_made(cpu=0.0004, assembly=0.0002, slowest=0.00005),
    ),
    "uneven samples": Training(made=lambda batch, worker: Made(cpu=0.02 if batch % 3 else 0.05, slowest=0.004)),
    "one worker of many is a little slower": Training(workers=8, made=lambda b, w: Made(cpu=0.06 if w == 3 else 0.04)),
    "on a device": Training(backward_cpu=None, behind=4, copy=0.0005, loader=(("device", "cuda"),)),
    "noisy": Training(noise=0.4),
}


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_training_is_not_accused(training: Training) -> None:
    for seed in range(10):
        rank = replace(training, seed=seed).rank()
        rank.events.append({"time": 5.2, "event": "graph", "operations": 160})
        looks(rank, 0.0, "")
        gauges(
            rank, private=lambda second: 4e8 + 4e8 * (1 - math.exp(-second)), open_files=lambda second: 20 + second % 3
        )
        found = verdict(rank)
        assert found.enough
        assert found.findings == (), "\n".join(found.lines())
        assert "nothing holds this training back" in found.says


def test_memory_that_levels_off_is_not_growth() -> None:
    rank = Training(batches=1200).rank()
    gauges(rank, private=lambda second: 4e8 + 6e8 * (1 - math.exp(-second / 4)))
    assert verdict(rank).findings == ()


def test_growth_names_its_rank() -> None:
    ranks = [Training(batches=500).rank(number) for number in range(2)]
    gauges(ranks[1], private=lambda second: 4e8 + 4e7 * second)
    (found,) = verdict(*ranks).findings
    assert (found.cause, found.rank) == ("memory", 1)


def test_healthy_ranks_are_not_accused() -> None:
    for seed in range(10):
        ranks = [Training(seed=seed, backward=0.014, local_ranks=4, noise=0.1).rank(number) for number in range(4)]
        assert verdict(*ranks).findings == ()


# ---- what is said of it


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ({"every_minutes": 0.01}, "checkpoint.every_minutes: 0.01 -> 10: about 15% less time"),
        ({"every_minutes": 20.0, "every_steps": 7}, "checkpoint.every_steps: 7 -> null: about 15% less time"),
        ({"every_minutes": 10.0, "every_steps": None}, "longer epochs, since each ends in a save"),
        ({"every_minutes": "${oc.env:MINUTES}"}, "longer epochs, since each ends in a save"),
    ],
)
def test_saving_less_often_is_said_of_what_saves_often(section: dict[str, Any], change: str) -> None:
    (found,) = judge(checkpoint(1.0), {**SETTINGS, "checkpoint": section}, {}).findings
    assert change in found.remedy


def test_saves_that_go_on_are_not_promised_away() -> None:
    rank = Training(batches=400).rank()
    pauses(rank, "checkpoint", every=1.0, seconds=0.2)
    slow = [e | {"seconds": 30.0} if e.get("name") == "checkpoint" else e for e in rank.events]
    (found,) = judge([Rank(0, rank.records, slow)], SETTINGS, {}).findings
    assert found.share > 0.9
    # A save of 30 s every 50 minutes still takes 1 %.
    assert found.remedy == f"checkpoint.every_minutes: 0.01 -> 50: about {percent(found.share - 0.01)} less time"


def test_too_little_is_no_evidence() -> None:
    few = Training(batches=12, workers=0, made=_made(cpu=0.2)).rank()
    short = Training(batches=60, forward=0.001, backward=0.001, workers=0, made=_made(cpu=0.005)).rank()
    for rank in (few, short, Rank(0)):
        found = verdict(rank)
        assert not found.enough
        assert not found.findings
        assert "not enough evidence" in found.says
    assert not judge([], {}, {}).enough


def test_the_warm_up_is_left_out() -> None:
    rank = Training().rank()
    slow = [r._replace(wait=r.wait + 9.0, wall=r.wall + 9.0) if i < 3 else r for i, r in enumerate(rank.records)]
    slow[0] = slow[0]._replace(time=slow[0].wall + 5.0)
    assert verdict(Rank(0, slow, rank.events)).findings == ()


def test_one_hiccup_is_no_habit() -> None:
    rank = Training().rank()
    rank.records[100] = rank.records[100]._replace(wait=1.0, wall=1.024, ready=0)
    assert verdict(rank).findings == ()


def test_pauses_are_not_the_loader_s_fault_nor_the_step_s() -> None:
    rank = Training(batches=400).rank()
    pauses(rank, "validation", every=2.0, seconds=0.5)
    pauses(rank, "checkpoint", every=4.0, seconds=0.2)
    assert verdict(rank).findings == ()


def test_a_crowded_machine_is_not_the_loader_s_fault() -> None:
    """Workers and the training thread stand in the queue for cores that others use; a real shortage is still told."""

    def crowded(cpu: float) -> Verdict:
        rank = Training(
            batches=300,
            cores=2,
            forward=0.02,
            backward=0.02,
            made=lambda batch, worker: Made(cpu, queued=0.16, slowest=0.03),
        ).rank()
        gauges(rank, cpu=lambda _: 99.0, process_cpu=lambda second: 0.3 * second)
        for second in range(1, int(rank.records[-1].time - 6)):
            event = {"time": 6.0 + second, "event": "looks", "looks": 20, "seconds": 1.0, "cpu": 0.2, "at": []}
            rank.events.append({**event, "queued": 0.3})
        return verdict(rank)

    assert [finding.cause for finding in crowded(0.005).findings] == ["other_processes"]
    assert first(crowded(0.2)) == "transforms"


def test_gpu_utilisation_is_no_evidence() -> None:
    idle, busy = Training().rank(), Training(workers=0, made=_made(cpu=0.03)).rank()
    gauges(idle, gpu=lambda _: 3.0)
    gauges(busy, gpu=lambda _: 100.0)
    assert verdict(idle).findings == ()
    assert first(verdict(busy)) == "no_workers"


def test_a_saw_tooth_of_the_gpu_s_use_is_told() -> None:
    (rank,) = jitter(2)
    gauges(rank, gpu=lambda second: 95.0 if second % 2 else 4.0)
    assert "saw-tooth, 4 % to 95 %" in verdict(rank).findings[0].evidence


def test_the_remedy_is_an_exact_change_with_its_gain() -> None:
    (found,) = verdict(*few_workers(1.5)).findings
    assert "data.workers: 1 -> 3" in found.remedy
    packs = verdict(*transforms(1.0)).findings[0].remedy
    assert "python -m fasttrain pack photos" in packs
    assert "(1.5 times as fast)" in packs
    anew = judge(epoch_start(2), {"data": {"persistent_workers": False}}, {}).findings[0]
    assert "data.persistent_workers: false -> true" in anew.remedy
    assert "checkpoint.every_minutes: 0.01 -> 10" in verdict(*checkpoint(1)).findings[0].remedy


@pytest.mark.parametrize("cause", [transforms, disk, jitter, quota])
def test_what_is_packed_is_not_to_be_packed(cause: Callable[[float], list[Rank]]) -> None:
    for stored, instead in (
        ("raw", "lighter transforms"),
        ("memory", "lighter"),
        ("jpeg", "--format raw"),
        (None, "pack"),
    ):
        (rank,) = cause(2.0)
        events = [event | {"stored": stored} if event["event"] == "loader" else event for event in rank.events]
        remedy = verdict(Rank(0, rank.records, events)).findings[0].remedy
        assert instead in remedy
        assert ("python -m fasttrain pack photos" in remedy) == (stored is None)


def test_the_part_of_the_validation_that_is_bearable_is_right() -> None:
    rank = Training(batches=400).rank()
    pauses(rank, "validation", every=1.0, seconds=1.0)
    (found,) = verdict(rank).findings
    count, wall = int(found.evidence.split()[0]), sum(record.wall for record in rank.records[3:])
    part = float(found.remedy.split("epochs; ")[1].split("%")[0]) / 100
    assert part * count / (part * count + wall) == pytest.approx(0.1, abs=0.01)


def test_on_a_gpu_communication_is_not_guessed() -> None:
    """A backward pass is often more than twice as long as its forward pass."""
    ranks = [Training(backward=0.06, backward_cpu=None).rank(number) for number in range(2)]
    assert not verdict(*ranks).findings


def test_on_apples_devices_the_phase_in_which_the_host_waits_is_not_accused() -> None:
    slow = Training(optimizer=0.08, forward=0.002, backward=0.003)
    assert first(verdict(slow.rank())) == "optimizer"
    assert not verdict(replace(slow, loader=(("device", "mps"),)).rank()).findings


def test_the_slow_rank_is_named_with_its_cause() -> None:
    (found, *_) = verdict(*slow_rank_by_data(2)).findings
    assert found.rank == 1
    assert "disk" in found.says
    (found, *_) = verdict(*slow_rank(2)).findings
    assert (found.rank, "forward" in found.says) == (1, True)


def test_buffers_broadcast_in_forward_do_not_hide_a_slow_rank() -> None:
    """Rank 0 is late by its data; the other one waits for its buffers, in the forward pass."""

    def wait_for_it(batch: int, phases: dict[str, float]) -> None:
        phases["forward"] += 0.025

    slow = Training(made=_made(cpu=0.01, asleep=0.1)).rank(0)
    found = verdict(slow, Training(step=wait_for_it).rank(1)).findings[0]
    assert (found.cause, found.rank) == ("slow_rank", 0)


def test_runs_of_an_older_version_are_judged_too() -> None:
    """Their records know neither the worker's cores nor looks."""
    (rank,) = transforms(2)
    old = [r._replace(made_cpu=None, made_queued=None, assembly=None, slowest=None, tail=None) for r in rank.records]
    assert first(verdict(Rank(0, old, []))) in ("transforms", "few_workers")


def test_judging_changes_nothing_and_gives_the_same_again() -> None:
    ranks = slow_rank_by_data(1.5)
    before = [(len(rank.records), len(rank.events)) for rank in ranks]
    assert judge(ranks, SETTINGS, {}) == judge(ranks, SETTINGS, {})
    assert [(len(rank.records), len(rank.events)) for rank in ranks] == before


def test_the_last_seconds_of_a_run_are_judged_by_themselves() -> None:
    """The fault came later: the whole run has less of it than its end."""
    rank = Training(
        batches=300, step=lambda batch, phases: phases.update(optimizer=0.08 if batch > 180 else 0.001)
    ).rank()
    late = history.last(rank, 3.0)
    assert late.records[0].time >= rank.records[-1].time - 3.0
    assert verdict(late).findings[0].share > verdict(rank).findings[0].share
