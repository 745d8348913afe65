"""The step itself and what stands between steps: copies, tiny kernels, the optimizer, logging, saving, validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

from fasttrain.evidence import LEAST_LOOKS, SURE, Side, ms, percent, section_of, sure_above, sure_of_count
from fasttrain.findings import Finding

COPY = 0.08  # parts of the wall time from which these are findings
OPTIMIZER = 0.30
OTHER = 0.15
LOGGING = 0.08  # of the looks at the training thread
CHECKPOINT = 0.10  # of the time with pauses
VALIDATION = 0.30
BEARABLE = 0.10  # of the time: what the remedy for a long validation aims at
OPTIMIZER_SECONDS = 0.002  # a step of the optimizer that is shorter is not worth a word
MANY = 250  # operations of a forward pass from which starting them can be what takes the time
EACH = 25e-6  # seconds that an operation takes, its part of the backward pass included, if starting it is all there is
QUEUED = 0.25  # part of the time that the training thread was ready to run without a core
CROWDED = 90.0  # percent of the cores in use


def find(side: Side, settings: Mapping[str, Any]) -> list[Finding]:
    """What costs time beside the data."""
    causes: tuple[Callable[[Side, Mapping[str, Any]], Finding | None], ...] = (
        _copy,
        _tiny_kernels,
        _optimizer,
        _logging,
        _saving,
        _checkpoint,
        _validation,
        _other,
        _other_processes,
    )
    if side.loader.get("device") == "mps":  # watched by the host's clock: which phase waits for the device says little
        causes = tuple(cause for cause in causes if cause not in (_copy, _tiny_kernels, _optimizer))
    return [found for cause in causes if (found := cause(side, settings)) is not None]


def _phase(side: Side, name: str, limit: float) -> tuple[float, float]:
    return sure_above([getattr(r, name) for r in side.records], [r.wall for r in side.records], limit)


def _copy(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    share, sure = _phase(side, "copy", COPY)
    if sure < SURE:
        return None
    size, took = float(side.loader.get("bytes") or 0), side.mean("copy")
    types = side.loader.get("types") or []
    numbers = f"the device waits {ms(took)} a batch for its copy, {percent(share)} of the time"
    numbers += f"; {size / 1e6:.1f} MB a batch of {', '.join(types)}" if size else ""
    if side.loader.get("pinned") is False and side.loader.get("device") == "cuda":
        says, remedy = (
            "copies to the device don't overlap with computing: the batches are not in pinned memory",
            (
                "data.pin_memory: false -> null"
                if section_of(settings, "data").get("pin_memory") is False
                else "raise the limit of locked memory (ulimit -l), or see in the log why batches can't be pinned"
            ),
        )
        return Finding("pinning", share, sure, says, f"{numbers}; pageable memory", f"{remedy}: up to {percent(share)}")
    if any(kind in ("float32", "float64", "float16", "bfloat16") for kind in types) and size > 1e5:
        part = 8 if "float64" in types else 4 if "float32" in types else 2
        says = "the samples are copied as floating point numbers"
        remedy = (
            f"in data.py return uint8 and let Prepare normalise on the device: a {part}th of the bytes, "
            f"about {ms(took * (1 - 1 / part))} a batch saved"
        )
        return Finding("copy_type", share, sure, says, numbers, remedy)
    return Finding(
        "copy",
        share,
        sure,
        "copying batches to the device takes longer than computing on them",
        numbers,
        "smaller images or fewer bytes a sample; a device in a slot with more PCIe lanes",
    )


def _tiny_kernels(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    """Very many operations, each so short that starting it is what takes the time."""
    count = side.operations or 0
    if count < MANY:
        return None
    step = side.mean("forward") + side.mean("backward")
    host = [r.backward_cpu for r in side.records if r.backward_cpu is not None]
    if host and fmean(host) > 0:
        # The thread's own time: on a crowded machine the clock says nothing about an operation.
        step = fmean(host) * step / max(1e-9, side.mean("backward"))
    each = step / count
    behind = [r.behind for r in side.records if r.behind is not None]
    follows = not behind or fmean(b <= 1 for b in behind) >= 0.9  # the device keeps up with the host: it has no queue
    share, sure = sure_above([r.forward + r.backward for r in side.records], [r.wall for r in side.records], 0.4)
    limit = EACH * (2 if behind else 1) if follows else 0.0
    if each > limit or sure < SURE:
        return None
    device = "; the device is never behind the host, so it waits for the next one" if behind else ""
    return Finding(
        "tiny_kernels",
        share,
        sure,
        "the step consists of very many tiny operations: starting them takes the time",
        f"{count} operations in the forward pass, {each * 1e6:.0f} us each with its backward pass{device}",
        "model.compile: false -> true fuses them; a larger data.batch_size gives each more to do for the same start; "
        "in model.py replace loops over small tensors by one operation on a stacked tensor",
    )


def _optimizer(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    looks = [look for look in side.looks if look.phase == "optimizer"]
    foreign = sum(look.count for look in looks if look.kind) / max(1, sum(look.count for look in looks))
    share, sure = sure_above(
        [r.optimizer * (1 - foreign) for r in side.records], [r.wall for r in side.records], OPTIMIZER
    )
    if sure < SURE or side.mean("optimizer") < OPTIMIZER_SECONDS:
        return None
    section, train = section_of(settings, "optimizer"), section_of(settings, "train")
    accumulate = int(train.get("accumulate") or 1)
    where = f"; {looks[0].count} of {sum(k.count for k in looks)} looks at it: {looks[0].own}" if looks else ""
    return Finding(
        "optimizer",
        share,
        sure,
        "the optimizer takes a large part of each step",
        f"{ms(side.mean('optimizer'))} of {ms(side.mean('wall'))} a batch, {percent(share)}; computing the gradients "
        f"takes {ms(side.mean('forward') + side.mean('backward'))} ({section.get('name', 'optimizer')}){where}",
        f"train.accumulate: {accumulate} -> {4 * accumulate} takes a step every {4 * accumulate} batches "
        f"(the effective batch grows with it): about {percent(share * 0.75)} less time; use the fused optimizer "
        "(update.build_optimizer), and nothing of your own in a loop over parameters",
    )


def _logging(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    return _looked_at(
        side,
        "logging",
        "logging",
        "log lines or prints hold up the training thread",
        "log at an interval, through `from loguru import logger`, which never waits for a disk or a terminal; "
        "take this handler or print out of the loop",
    )


def _saving(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    return _looked_at(
        side,
        "saving",
        "checkpoint",
        "files are saved in the middle of the loop",
        "save by checkpoint.every_minutes instead of in the loop",
    )


def _looked_at(side: Side, kind: str, cause: str, says: str, remedy: str) -> Finding | None:
    looks = [look for look in side.looks if look.kind == kind and look.phase != "wait"]
    found = sum(look.count for look in looks)
    share, sure = sure_of_count(found, side.looked, LOGGING)
    if side.looked < LEAST_LOOKS or sure < SURE:
        return None
    phases = sorted({look.phase for look in looks})
    return Finding(
        cause,
        share,
        sure,
        says,
        f"of {side.looked} looks at the training thread {found} found it there, in the phase {' and '.join(phases)}: "
        f"{looks[0].inner}, called from {looks[0].own}",
        f"{remedy}: {percent(share)} of the time",
    )


def _checkpoint(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    pauses = side.pauses.get("checkpoint", [])
    share = sum(pauses) / side.elapsed
    if len(pauses) < 3 or share < CHECKPOINT:
        return None
    section = section_of(settings, "checkpoint")
    every, steps = section.get("every_minutes"), section.get("every_steps")
    every = every if isinstance(every, (int, float)) else 10.0  # in config.yaml it may be a reference
    often = side.elapsed / len(pauses)
    wanted = max(10.0, every, round(sum(pauses) / len(pauses) * 100 / 60, 1))  # minutes: saving then takes 1 %
    changes = [f"checkpoint.every_minutes: {every:g} -> {wanted:g}"] * (every < wanted)
    changes += [f"checkpoint.every_steps: {steps} -> null"] * bool(steps)
    change = " and ".join(changes) or "longer epochs, since each ends in a save, or a faster disk for run.dir"
    return Finding(
        "checkpoint",
        share,
        0.97,
        "writing checkpoints stops the training often",
        f"{len(pauses)} times, every {often:.1f} s, {ms(median(pauses))} each: {percent(share)} of the time",
        f"{change}: about {percent(share * (1 - often / (60 * wanted)))} less time",
    )


def _validation(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    pauses = side.pauses.get("validation", [])
    share = sum(pauses) / side.elapsed
    if len(pauses) < 2 or share < VALIDATION:
        return None
    fraction = section_of(settings, "data").get("val_fraction", 0.1)
    return Finding(
        "validation",
        share,
        0.97,
        "validation takes a large part of the time",
        f"{len(pauses)} times, {median(pauses):.2f} s each: {percent(share)} of the time",
        f"fewer validation images (data.val_fraction: {fraction} -> smaller, or fewer files in val/), or longer "
        f"epochs; {percent(_reduced(share))} of them would take {percent(BEARABLE)}",
    )


def _reduced(share: float) -> float:
    """The part of a validation that would take `BEARABLE` of the time, which is less then: the training's own stays."""
    return BEARABLE * (1 - share) / (share * (1 - BEARABLE))


def _other(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    looks = [look for look in side.looks if look.phase == "other"]
    foreign = sum(look.count for look in looks if look.kind) / max(1, sum(look.count for look in looks))
    share, sure = sure_above([r.other * (1 - foreign) for r in side.records], [r.wall for r in side.records], OTHER)
    if sure < SURE or side.mean("other") < 0.0005:
        return None
    own = [look for look in looks if not look.kind]
    where = f"; of {sum(k.count for k in looks)} looks at it {own[0].count}: {own[0].own}" if own else ""
    return Finding(
        "other",
        share,
        sure,
        "time goes to what stands between the marks of the loop, not to the step",
        f"{ms(side.mean('other'))} of {ms(side.mean('wall'))} a batch, {percent(share)}{where}",
        "move it out of the loop, or do it every so many steps; watch.mark names a phase of your own",
    )


def _other_processes(side: Side, settings: Mapping[str, Any]) -> Finding | None:
    """The training thread stands in the queue for a core, and it is not this training that fills the cores."""
    cores = int(side.loader.get("cores") or 0)
    if side.thread is None or not cores or side.thread[0] < 2.0 or side.loader.get("quota"):
        return None  # under a quota the queue is its doing, and the gauges tell of the whole machine
    queued = side.thread[2] / side.thread[0]
    used = [(g["time"], g["process_cpu"], g["cpu"]) for g in side.gauges if "process_cpu" in g and "cpu" in g]
    if queued < QUEUED or len(used) < 3:
        return None
    span = used[-1][0] - used[0][0]
    loader = sum(r.made_cpu or 0.0 for r in side.records if used[0][0] < r.time <= used[-1][0] and r.worker is not None)
    ranks = int(side.loader.get("local_ranks") or 1)
    own = ((used[-1][1] - used[0][1]) + loader) / span * ranks
    busy = fmean(cpu for _, _, cpu in used[1:])
    foreign = busy / 100 * cores - own
    if busy < CROWDED or foreign < 0.25 * cores:
        return None
    return Finding(
        "other_processes",
        queued,
        0.9,
        f"other processes use {foreign:.1f} of the {cores} cores",
        f"the cores are {busy:.0f} % busy, {own:.1f} of them by this training; its main thread stands in the queue for "
        f"a core {percent(queued)} of the time",
        "end the other processes, or keep these cores to the training (taskset, --cpuset-cpus)",
    )
