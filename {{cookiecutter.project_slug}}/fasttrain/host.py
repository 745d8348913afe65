"""What psutil and the cgroup files know of this machine. Each reading may raise; gauges.py turns that into n/a."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from fasttrain import machine
from fasttrain.effort import open_files, private_memory

UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for "no limit"


class Host:
    """Readings of this machine. Load and throughput are those since the reading before, in the same thread.

    Args:
        data_path: a file or folder on the disk to watch; None, or a disk that can't be told, watches all of them.
    """

    def __init__(self, data_path: Path | None) -> None:
        self._process = psutil.Process()
        self._disk = disk_of(data_path) if data_path else None
        self._last: tuple[float, Any, dict[str, Any]] | None = None

    def readings(self) -> Mapping[str, Callable[[], Any]]:
        """A function for each field of `gauges.Sample`, and ``disk`` for the three of the disk."""
        return {
            "cores": self._cores,
            "memory_used": lambda: memory()[0],
            "memory_total": lambda: memory()[1],
            "rss": lambda: self._process.memory_info().rss,
            "open_files": lambda: open_files(self._process),
            "private": lambda: private_memory(self._process),
            "process_cpu": lambda: sum(self._process.cpu_times()[:2]),
            "throttled": machine.throttled,
            "disk": self._throughput,
        }

    def _cores(self) -> tuple[float, ...]:
        """Percent of each core that this process may use."""
        each = psutil.cpu_percent(percpu=True)
        allowed = self._process.cpu_affinity() if hasattr(self._process, "cpu_affinity") else None
        if not allowed or max(allowed) >= len(each):
            return tuple(each)
        return tuple(each[core] for core in allowed)

    def _throughput(self) -> dict[str, float | None]:
        disks: dict[str, Any] = psutil.disk_io_counters(perdisk=True) or {}
        if self._disk in disks:
            disks = {self._disk: disks[self._disk]}
            total = disks[self._disk]
        else:
            total = psutil.disk_io_counters()
        now, last = time.monotonic(), self._last
        self._last = (now, total, disks)
        if total is None or last is None or last[1] is None or now <= last[0]:
            return {}
        seconds = now - last[0]
        busy = [
            (disk.busy_time - last[2][name].busy_time) / seconds / 10  # milliseconds a second, in percent
            for name, disk in disks.items()
            if name in last[2] and hasattr(disk, "busy_time")
        ]
        return {
            "disk_read": (total.read_bytes - last[1].read_bytes) / seconds / 1e6,
            "disk_write": (total.write_bytes - last[1].write_bytes) / seconds / 1e6,
            "disk_busy": min(100.0, max(busy)) if busy else None,
        }


def disk_of(path: Path) -> str | None:
    """The whole disk that a path lies on, by psutil's name (``nvme0n1``); None where that can't be told.

    Network, overlay and memory file systems have none, nor have other systems than Linux.
    """
    try:
        device = path.stat().st_dev
        block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except (OSError, AttributeError):
        return None
    return block.parent.name if (block / "partition").exists() else block.name


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Bytes used (without the page cache) and in all: of the container where it has a limit, else of the machine.

    Args:
        root: of the file system that tells about control groups; the tests give another.
    """
    whole = psutil.virtual_memory()
    total = int(whole.total)
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in machine.groups(root, "memory"):
            allowed = _number(folder / limit)
            current = _number(folder / used)
            if allowed is not None and current is not None and allowed < min(total, UNLIMITED):
                return max(0, current - _statistic(folder / "memory.stat", cache)), allowed
    return total - int(whole.available), total


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
