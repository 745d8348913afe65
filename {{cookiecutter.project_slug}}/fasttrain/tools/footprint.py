"""What loader settings take from a machine, and which of them it can bear: known before anything is started."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fasttrain.tools.search import Choice, Space

FORKED, SPAWNED = 100e6, 400e6  # bytes of a loader process; 20 and 320 MB were measured, decoding comes on top
PART = 0.7  # of the free memory that may be planned with
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # workers of one training process
PREFETCH = (4, 8, 16)
CAUTIOUS = 4  # workers where processes are costly: Windows, WSL
SPARE = 2  # batches a worker holds besides those made ahead (slots.py)


@dataclass(frozen=True)
class Machine:
    """What may be used, by all training processes of this machine together. Sizes in bytes."""

    cores: int
    memory: int  # free
    shared: int | None  # free in /dev/shm, where batches must go through it; None: they need not
    cautious: bool = False  # Windows, WSL
    forks: bool = True  # workers are forked, and share the memory of their parent


@dataclass(frozen=True)
class Need:
    """Bytes, for all training processes."""

    memory: int
    shared: int


def need(choice: Choice, batch_bytes: int, processes: int, forks: bool) -> Need:
    """What the loaders of training and validation take: their processes, and the batches that lie ready."""
    each = (choice.prefetch if choice.workers else 0) + SPARE
    batches = 2 * each * max(1, choice.workers) * batch_bytes * processes
    workers = 2 * choice.workers * (FORKED if forks else SPAWNED) * processes
    return Need(math.ceil(workers + batches), batches)


def fits(choice: Choice, machine: Machine, batch_bytes: int, processes: int) -> bool:
    """Whether that is at most `PART` of what is free."""
    wanted = need(choice, batch_bytes, processes, machine.forks)
    return wanted.memory <= PART * machine.memory and (machine.shared is None or wanted.shared <= PART * machine.shared)


def space(start: Choice, machine: Machine, batch_bytes: int, processes: int, on_cpu: bool) -> Space:
    """The values that ``tune`` tries.

    Args:
        start: the settings now; they are in it, whatever they take.
        on_cpu: computing takes the CPU's cores, so that its threads are searched, too.
    """
    cores = max(1, machine.cores // processes)
    most = max(1, math.ceil(1.5 * cores))  # more than cores: some of them wait for the disk
    most = min(most, CAUTIOUS) if machine.cautious else most

    def can(**changes: int) -> bool:
        return fits(start._replace(**changes), machine, batch_bytes, processes)

    workers = {n for n in LADDER if n <= most and can(workers=n, prefetch=start.prefetch)}
    prefetch = {n for n in PREFETCH if can(workers=max(start.workers, max(workers, default=0) // 2), prefetch=n)}
    threads = {n for n in (1, cores // 2, cores) if n} if on_cpu else set()
    return Space(
        tuple(sorted(workers | {start.workers})),
        tuple(sorted(prefetch | {start.prefetch})),
        tuple(sorted(threads | {start.threads})),
    )
