"""What this process may use of the machine, containers and CPU sets considered."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control groups, rounded up; at least 1.

    Args:
        root: of the file system that tells about control groups; the tests give another.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, min(affinity, affinity if quota is None else -int(-quota // 1)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's control groups, in cores; None where there is none."""
    quotas: list[float] = []
    for folder in groups(root, "cpu"):
        limit, period = _words(folder / "cpu.max"), 100_000.0  # version 2: "200000 100000", or "max 100000"
        if not limit:  # version 1
            limit = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(limit) > 1:
            period = float(limit[1])
        if limit and limit[0] not in ("max", "-1") and period > 0:
            quotas.append(float(limit[0]) / period)
    return min(quotas, default=None)


def throttled(root: Path = Path("/")) -> float | None:
    """Seconds that the threads of this process's control group had to stand still for its CPU quota, since it began."""
    found: list[float] = []
    for folder in groups(root, "cpu"):
        words = _words(folder / "cpu.stat")
        for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):  # version 2, version 1
            if name in words[:-1]:
                found.append(int(words[words.index(name) + 1]) / unit)
    return max(found, default=None)


def limits() -> dict[str, Any]:
    """Cores, CPU quota, training processes on this machine, most open files: what the verdict has to know."""
    return {
        "cores": cores(),
        "quota": cpu_quota(),
        "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "most_files": _most_files(),
    }


def _most_files() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def default_workers(processes: int) -> int:
    """Loader workers for each of so many training processes on this machine: the cores shared out, 1 to 16.

    More than 16 rarely help one device, and each costs memory.
    """
    return max(1, min(16, cores() // processes))


def groups(root: Path, controller: str) -> list[Path]:
    """The control-group folders that bind this process for a controller (cpu, memory), of either version.

    Its own comes first, then those above it.
    """
    folders: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = top / path.lstrip("/")
        folders += [own, *(above for above in own.parents if above == top or top in above.parents)]
        if top not in folders:  # in a container the path may be the host's, and the folder the top one
            folders.append(top)
    return folders


def is_windows_or_wsl() -> bool:
    """Whether loader processes are costly here: started afresh on Windows, behind a slow file system under WSL."""
    return os.name == "nt" or "microsoft" in platform.uname().release.lower()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # not Linux, or not readable: no limit known
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()
