"""One finding of the verdict, and the names of all causes."""

from __future__ import annotations

from dataclasses import dataclass, replace

CAUSES: tuple[str, ...] = (
    "no_workers",  # the training process loads its own data
    "few_workers",
    "transforms",  # decoding and transforms take more than the cores can do
    "disk",  # the loader sleeps: disk, network, locks
    "jitter",  # enough on average, but single samples or batches come late
    "epoch_start",
    "slow_worker",
    "collate",
    "quota",  # more workers than cores, or a CPU quota that throttles
    "hand_over",  # batches lie ready and still take time: copies through shared memory
    "pinning",  # copies don't overlap: pageable memory
    "copy_type",  # float where uint8 would do
    "copy",
    "tiny_kernels",
    "optimizer",
    "logging",
    "checkpoint",
    "validation",
    "other",  # between the marks
    "slow_rank",
    "stragglers",  # ranks take turns in being late
    "communication",
    "memory",
    "files",
    "other_processes",
)


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
    weight: float = 0.0  # where it stands among the others if it costs no time: as if it were this share

    def at(self, rank: int | None) -> Finding:
        """The same about this rank."""
        return replace(self, rank=rank)
