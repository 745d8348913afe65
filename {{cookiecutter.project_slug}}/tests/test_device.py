"""What is chosen for a machine: cores, number format; and what does without Linux."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from conftest import HOME, QUICK, launch

from fasttrain import clock, machine, precision


def groups(root: Path, lines: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        ("0::/../../elsewhere\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            "4:cpu,cpuacct:/docker/x\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("4:cpu:/x\n", {"sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_quota_of_a_container_is_found(
    tmp_path: Path, lines: str, files: dict[str, str], quota: float | None
) -> None:
    assert machine.cpu_quota(groups(tmp_path, lines, files)) == quota


def test_no_control_groups_no_quota(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path) is None


def test_cores_are_bounded_by_quota_and_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.cores(tmp_path) == 8
    assert machine.cores(groups(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"})) == 3
    assert machine.cores(groups(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "1000 100000"})) == 1


@pytest.mark.parametrize(("cores", "processes", "workers"), [(2, 1, 2), (2, 2, 1), (2, 4, 1), (128, 1, 16), (64, 8, 8)])
def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int) -> None:
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert machine.default_workers(processes) == workers


@pytest.mark.parametrize(
    ("flags", "has"),
    [("flags\t: fpu avx2 avx512_bf16\n", True), ("flags\t: fpu avx2\n", False), ("Features\t: fp asimd bf16\n", True)],
)
def test_bfloat16_of_a_cpu_is_read_from_its_flags(tmp_path: Path, flags: str, has: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: X bf16 amx_bf16\n{flags}")
    assert precision.cpu_has_bfloat16(tmp_path / "cpuinfo") is has


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_auto_on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert precision.choose("auto", torch.device("cuda")) is dtype
    assert precision.choose("off", torch.device("cuda")) is None
    assert precision.choose("fp16", torch.device("cuda")) is torch.float16


def test_apples_devices_are_timed_by_the_host_and_waited_for_in_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    watch = clock.clock_of(torch.device("mps"))
    begin = watch.stamp()
    assert watch.passed(begin)
    assert watch.seconds(begin, watch.stamp()) >= 0
    assert waited == []
    watch.settle()
    assert waited == ["mps"]


ELSEWHERE = """
import multiprocessing.reduction, os, pkgutil, signal, sys
import cv2, loguru, omegaconf, psutil, rich, torch  # what they need is their own affair
for module, names in {
    os: "memfd_create O_CLOEXEC sched_getaffinity killpg",
    signal: "SIGKILL SIGCONT SIGSTOP SIGUSR1 SIGHUP alarm pthread_sigmask sigtimedwait",
    multiprocessing.reduction: "DupFd",
}.items():
    for name in names.split():
        delattr(module, name)
for name in ("fcntl", "resource"):
    sys.modules[name] = None  # its import raises ImportError
import fasttrain, train
for module in pkgutil.walk_packages(fasttrain.__path__, "fasttrain."):
    if module.name != "fasttrain.__main__":  # which runs the command line
        __import__(module.name)
from fasttrain import effort, failures, worker
print(failures.how_it_ended(1 << 30))
effort.QueueTime()()
worker.die_with_parent = lambda parent: None  # itself only on Linux
worker.WorkerInit(1, 0, None)(0)
train.main()
"""


def test_what_only_linux_and_other_unix_systems_have_is_not_needed(images: Path, tmp_path: Path) -> None:
    """The names that Windows lacks are taken away; its files and processes themselves are not played here."""
    arguments = [*QUICK, f"data.path={images}", f"run.dir={tmp_path / 'run'}", "train.max_steps=3"]
    code, output = launch([sys.executable, "-c", ELSEWHERE, *arguments], tmp_path, PYTHONPATH=str(HOME))
    assert code == 0, output
    assert output.startswith("was killed")
    assert (tmp_path / "run" / "last.pt").exists()
