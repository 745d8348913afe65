"""Waiting for data: whether the supply is short, and which part of the loader makes it so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from fasttrain.evidence import SURE, Side, ms, percent, section_of, sure_above
from fasttrain.findings import Finding
from fasttrain.supply import ENOUGH, Supply, crowded, late_seconds, supply_of, tail_of, throttled, worked

SHORT = 0.10  # part of the wall time from which waiting for data is a finding
# Seconds on a core that a packed sample takes. Measured: 14,200 images a second from 2 cores, stored raw with 256
# pixels a side and cropped to 224, so 0.14 ms; a little more here, for not promising too much.
PACKED = 0.00017


def find(side: Side, settings: Mapping[str, Any]) -> list[Finding]:
    """What the waits say; empty if the supply is not short."""
    late = [late_seconds(record, side) for record in side.records]
    share, sure = sure_above(late, [record.wall for record in side.records], SHORT)
    if sure < SURE:
        return []
    supply = supply_of(side, share, sure, late)
    for cause in (_no_workers, _epoch_start, _quota, _slow_worker, _jitter, _hand_over, _collate, _disk, _few_workers):
        if cause is _hand_over and supply.enough and crowded(side):
            return []  # it would do, had other processes not taken the cores: they are named elsewhere
        if (found := cause(supply, settings)) is not None:
            return [found]
    return [_taking(supply)] if supply.enough else [_transforms(supply, settings)]


def _finding(supply: Supply, cause: str, says: str, evidence: str, remedy: str) -> Finding:
    return Finding(cause, supply.share, supply.sure, says, f"{supply.numbers}; {evidence}{_bursts(supply)}", remedy)


def _bursts(supply: Supply) -> str:
    """A saw-tooth of the device's use, where its gauge shows one."""
    gauge = [float(g["gpu"]) for g in supply.side.gauges if g.get("gpu") is not None]
    low, high = sum(g < 40 for g in gauge), sum(g > 80 for g in gauge)
    if len(gauge) >= 6 and low and high and low + high >= len(gauge) / 2:
        return f"; the GPU's use is a saw-tooth, {min(gauge):.0f} % to {max(gauge):.0f} %"
    return ""


def _pack(supply: Supply, settings: Mapping[str, Any]) -> str:
    """Packing, or what is left to do where the images are packed already."""
    stored = supply.side.loader.get("stored")
    if stored in ("raw", "memory"):
        return "lighter transforms in data.py, or smaller images, since these lie there decoded already"
    if stored == "jpeg":
        return "the images packed anew with --format raw, which spares their decoding, too"
    return _packing(supply, settings)


def _packing(supply: Supply, settings: Mapping[str, Any]) -> str:
    """Packing, with the gain to expect."""
    data = section_of(settings, "data")
    after = max(supply.rest, supply.samples * PACKED / max(1, min(supply.workers, supply.cores)))
    now = max(supply.rest, fmean(record.wall for record in supply.side.records))
    source = data.get("path") or "PATH"
    return (
        f"python -m fasttrain pack {source} decodes and shrinks once: a step of about {ms(after)} "
        f"instead of {ms(now)} ({now / after:.1f} times as fast)"
    )


def _workers_to(supply: Supply, count: int) -> str:
    now, then = fmean(record.wall for record in supply.side.records), supply.with_workers(count)
    return f"data.workers: {supply.workers} -> {count}: a step of about {ms(then)} instead of {ms(now)}"


def _no_workers(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    if supply.workers or supply.side.records[-1].worker is not None:
        return None
    count = supply.best_workers()
    remedy = _workers_to(supply, count)
    if supply.with_workers(count) > supply.rest / ENOUGH:
        remedy += f"; then {_pack(supply, settings)}"
    return _finding(
        supply,
        "no_workers",
        "the training process loads its own data, and the device waits meanwhile",
        "there are no loader workers",
        remedy,
    )


def _epoch_start(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    """Most of the waiting is in the first batches of epochs."""
    records, first = supply.side.records, max(2, supply.workers + 1)
    in_epoch, at_start, starts = 0, 0.0, 0
    for i, (record, late) in enumerate(zip(records, supply.late, strict=True)):
        if i and record.epoch != records[i - 1].epoch:
            in_epoch, starts = 0, starts + 1
        if starts and in_epoch < first:
            at_start += late
        in_epoch += 1
    if starts < 2 or at_start < 0.6 * sum(supply.late) or first * starts > 0.5 * len(records):
        return None
    kept = section_of(settings, "data").get("persistent_workers", True)
    remedy = (
        f"data.persistent_workers: false -> true saves about {ms(at_start / starts)} an epoch"
        if not kept
        else "data.prefetch_factor: raise it, so that more lies ready when the epoch begins"
    )
    return _finding(
        supply,
        "epoch_start",
        "each epoch begins with a stall: its first batches have to be waited for",
        f"{percent(at_start / sum(supply.late))} of the waiting is in the first {first} batches of {starts} epochs, "
        f"{ms(at_start / starts)} each",
        remedy,
    )


def _hand_over(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    """Batches lie ready, but come through new shared memory each."""
    loader = supply.side.loader
    ready = [record.ready for record in supply.side.records if record.ready is not None]
    if loader.get("slots", True) or not ready or not supply.enough:
        return None
    if fmean(ready) < supply.workers or tail_of(supply) > 0.3:
        return None
    return _finding(
        supply,
        "hand_over",
        "batches lie ready, but taking them costs: each comes through new shared memory",
        f"{fmean(ready):.1f} batches ready on average; without slots, since {loader.get('why_no_slots')}",
        "in data.py return a tuple of arrays and numbers of fixed shape from [index]: batches then lie in shared slots",
    )


def _taking(supply: Supply) -> Finding:
    """The supply would do, and yet there are waits."""
    return _finding(
        supply,
        "hand_over",
        "taking a batch costs time although the workers make them fast enough",
        "the workers are done in time",
        "raise data.prefetch_factor; if that doesn't help, look at what else keeps the training process busy "
        "(threads of its own, garbage collection)",
    )


def _slow_worker(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    by_worker: dict[int, list[float]] = {}
    for record in supply.side.records:
        if record.worker is not None and record.made is not None:
            by_worker.setdefault(record.worker, []).append(worked(record))
    if len(by_worker) < 2 or min(len(each) for each in by_worker.values()) < 4:
        return None
    middle = {worker: median(each) for worker, each in by_worker.items()}
    slowest = max(middle, key=lambda worker: middle[worker])
    others = [made for worker, each in by_worker.items() if worker != slowest for made in each]
    ratio = middle[slowest] / max(1e-9, median(others))
    slower = fmean(fmean(own > other for other in others) for own in by_worker[slowest])
    if ratio < 1.6 or slower < 0.9:
        return None
    return _finding(
        supply,
        "slow_worker",
        f"loader worker {slowest} is slow, and batches are taken in order, so all wait for it",
        f"worker {slowest} takes {ms(middle[slowest])} for a batch, the others {ms(median(others))} "
        f"({ratio:.1f} times; slower in {percent(slower)} of all pairs)",
        f"find what only worker {slowest} does in data.py (get_worker_info().id), or what shares its core; "
        f"at the others' speed a step takes about {ms(max(supply.rest, median(others) / supply.workers))}",
    )


def _jitter(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    """Enough on average, or it would be without the slow ones: the waits come from hiccups."""
    tail = tail_of(supply)
    unqueued = (supply.made - supply.queued) / max(1, supply.workers)
    steady = unqueued * (1 - tail)
    waits = sorted(record.wait for record in supply.side.records)
    few_long = waits[len(waits) // 2] < 0.25 * waits[int(0.95 * len(waits))]
    hiccups = tail >= 0.35 and (steady <= supply.free or tail >= 0.5)
    late_by_chance = supply.every <= ENOUGH * supply.rest and few_long and not crowded(supply.side)
    if not (hiccups or late_by_chance):
        return None
    slowest = max((record.slowest or 0.0 for record in supply.side.records), default=0.0)
    usual = (supply.made * (1 - tail)) / max(1, supply.samples)
    asleep = supply.asleep > 0.5 * supply.made
    prefetch = int(section_of(settings, "data").get("prefetch_factor") or 4)
    more = f"data.prefetch_factor: {prefetch} -> {min(32, 4 * prefetch)} evens out short hiccups; "
    cure = "the file system has them: data.warm=true, or " if asleep else "find them: "
    return _finding(
        supply,
        "jitter",
        "single samples come late: the loader is fast enough between its hiccups",
        f"{percent(tail)} of the loader's time goes into them (the slowest sample {ms(slowest)}, a usual one "
        f"{ms(usual)}); waits: half under {ms(waits[len(waits) // 2])}, one in twenty over "
        f"{ms(waits[int(0.95 * len(waits))])}; the worker was {'asleep (disk or network)' if asleep else 'computing'}",
        more + cure + _pack(supply, settings),
    )


def _quota(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    """More workers than cores, so that they stand in each other's way; or the container is throttled."""
    throttle = throttled(supply.side)
    crowded = supply.workers > math.ceil(supply.cores) and supply.queued > 0.3 * supply.made
    if not crowded and throttle < 0.1:
        return None
    fits = max(1, math.floor(supply.cores))
    limit = "the CPU quota" if supply.side.loader.get("quota") else "the cores that this process may use"
    held = f"; the quota made it stand still for {percent(throttle)} of the time" if throttle >= 0.1 else ""
    change = f"data.workers: {supply.workers} -> {fits}, or " if supply.workers > fits else ""
    return _finding(
        supply,
        "quota",
        f"{limit} hold the loader back: {supply.workers} workers share {supply.cores:.2g} cores",
        f"of the {ms(supply.made)} for a batch a worker waits {ms(supply.queued)} for a core and works "
        f"{ms(supply.cpu)}{held}",
        f"{change}give the container more cores (docker run --cpus); with these, {_pack(supply, settings)}",
    )


def _collate(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    together = supply.side.mean("assembly")
    if together < 0.4 * supply.made or together < 50e-6 * supply.samples:
        return None
    why = supply.side.loader.get("why_no_slots")
    return _finding(
        supply,
        "collate",
        "putting the samples of a batch together takes the loader's time",
        f"{ms(together)} of the {ms(supply.made)} for a batch" + (f"; without slots, since {why}" if why else ""),
        "in data.py return arrays of fixed shape (np.asarray), not lists, dictionaries or texts: they are then written "
        f"straight into place, and a batch takes about {ms(supply.made - together)}",
    )


def _disk(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    """The workers sleep: in the disk, the network, or a lock."""
    if supply.asleep < 0.4 * supply.made or supply.asleep < supply.cpu:
        return None
    read = [g["disk_read"] for g in supply.side.gauges if g.get("disk_read") is not None]
    busy = [g["disk_busy"] for g in supply.side.gauges if g.get("disk_busy") is not None]
    disk = f"; disk {fmean(read):.1f} MB/s" if read else ""
    disk += f", {fmean(busy):.0f} % busy" if busy else ""
    count = max(supply.workers + 1, supply.best_workers())
    return _finding(
        supply,
        "disk",
        "reading the samples is slow: the workers sleep, waiting for the disk or the network",
        f"of the {ms(supply.made)} for a batch a worker sleeps {ms(supply.asleep)} and works {ms(supply.cpu)}{disk}",
        f"{_workers_to(supply, count)}, since sleeping takes no core; "
        f"keep the data on a local disk, data.warm=true where it fits, or {_pack(supply, settings)}",
    )


def _few_workers(supply: Supply, settings: Mapping[str, Any]) -> Finding | None:
    count = supply.best_workers()
    after = supply.with_workers(count)
    now = fmean(record.wall for record in supply.side.records)
    if count <= supply.workers or after > min(1.3 * supply.rest, 0.9 * now):  # the cores will not do
        return None
    return _finding(
        supply,
        "few_workers",
        "there are too few loader workers",
        f"each works {ms(supply.cpu)} on a core for a batch, and {supply.cores:.2g} cores are there for "
        f"{supply.workers} of them",
        _workers_to(supply, count),
    )


def _transforms(supply: Supply, settings: Mapping[str, Any]) -> Finding:
    each = supply.cpu / max(1, supply.samples)
    count = supply.best_workers()
    more = f"{_workers_to(supply, count)}; " if count > supply.workers else ""
    return _finding(
        supply,
        "transforms",
        "decoding and transforming the samples takes more than the cores can do",
        f"{ms(each)} on a core for each of {supply.samples} samples, {supply.cores:.2g} cores for it",
        f"{more}{_pack(supply, settings)}; python -m fasttrain profile-data names the slowest transform",
    )
