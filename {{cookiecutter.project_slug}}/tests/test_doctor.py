"""What doctor finds on machines that are bad in one way each, and on this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HOME, launch

from fasttrain.tools import checks, doctor
from fasttrain.tools.checks import ERROR, OK, WARNING, Check
from fasttrain.tools.footprint import Machine, Need

GB = 10**9
IN_SHM = Machine(cores=8, memory=64 * GB, shared=8 * GB)
ANYWHERE = Machine(cores=8, memory=64 * GB, shared=None)

CASES: list[tuple[Check, str, str, str]] = [
    (checks.device("cpu", [], "2.9", 1, None), OK, "no GPU", ""),
    (checks.device("cpu", [], "2.9", 1, "550.1"), ERROR, "sees no GPU", "CUDA build"),
    (checks.device("cuda", ["H200"], "2.9", 2, "550.1"), ERROR, "2 processes, but 1 GPUs", "nproc-per-node=1"),
    (checks.device("cuda", ["H200"] * 4, "2.9", 1, "550.1"), WARNING, "4 x H200", "nproc-per-node=4"),
    (checks.device("cuda", ["H200"], "2.9", 1, "550.1"), OK, "driver 550.1", ""),
    (checks.nvml(False, "no library"), OK, "not needed", ""),
    (checks.nvml(True, "not supported"), WARNING, "not supported", "training works"),
    (checks.nvml(True, None), OK, "can be read", ""),
    (checks.cores(64, 4, 4.0, 1, 16), WARNING, "4 of 64 cores", "data.workers: 16 -> 4"),
    (checks.cores(8, 2, None, 4, 0), WARNING, "for 4 processes", "nproc-per-node=2"),
    (checks.cores(8, 8, None, 2, 4), OK, "2 x 4 loader workers", ""),
    (checks.memory(Need(30 * GB, 0), 4 * GB, 32 * GB), ERROR, "34.0 GB needed, 32.0 GB free", "lower data.workers"),
    (checks.memory(Need(20 * GB, 0), 4 * GB, 32 * GB), WARNING, "page cache", "lower data.workers"),
    (checks.memory(Need(1 * GB, 0), 1 * GB, 32 * GB), OK, "2.0 GB needed", ""),
    (checks.shared_memory(Need(GB, GB), IN_SHM, False, 64_000_000), ERROR, "1.0 GB needed", "--shm-size"),
    (checks.shared_memory(Need(GB, GB), ANYWHERE, True, 1_000_000), ERROR, "64 MB needed", "--shm-size"),
    (checks.shared_memory(Need(GB, GB), ANYWHERE, False, 64_000_000), OK, "not needed", ""),
    (checks.open_files(128, 4), ERROR, "128 allowed", "ulimit"),
    (checks.open_files(1000, 4), WARNING, "1,000 allowed", "ulimit"),
    (checks.open_files(None, 4), OK, "no limit", ""),
    (checks.disk(20e6, 400e3), WARNING, "50 samples a second", "pack"),
    (checks.disk(2e9, 400e3), OK, "5,000 samples", ""),
    (checks.disk(10e6, 2e3), OK, "5,000 samples", ""),
    (checks.disk(None, None), OK, "not measured", ""),
    (checks.checkpoints(2 * GB, 7 * GB, "/x"), ERROR, "4 checkpoints of about 2.0 GB, 7.0 GB free in /x", "run.dir"),
    (checks.checkpoints(2 * GB, 20 * GB, "/x"), WARNING, "20.0 GB free", "free some space"),
    (checks.checkpoints(2 * GB, 50 * GB, "/x"), OK, "50.0 GB free", ""),
    (checks.rendezvous(2, "nccl", None, "no route"), ERROR, "no route", "SOCKET_IFNAME"),
    (checks.rendezvous(2, "gloo", 45.0, None), WARNING, "45.0 s", "hostname"),
    (checks.rendezvous(2, "gloo", 0.5, None), OK, "0.5 s", ""),
    (checks.classes([10, 500], ["cat", "dog"]), WARNING, "from 10 (cat) to 500 (dog)", "accuracy"),
    (checks.classes([0, 5], ["cat", "dog"]), WARNING, "from 0 (cat)", "give cat training images"),
    (checks.classes([5, 7], ["cat", "dog"]), OK, "5 (cat) to 7 (dog)", ""),
    (checks.classes([], []), OK, "not known", ""),
    (checks.batches(129, 9, 64, 2, False), WARNING, "a last one of 1 sample", "drop_last=true"),
    (checks.batches(3, 9, 64, 2, True), ERROR, "not one", "data.batch_size: 64 -> 1"),
    (checks.batches(130, 9, 64, 2, True), OK, "2 samples are left out", ""),
    (checks.batches(103, 9, 10, 2, False), OK, "a last one of 2; 1 samples are taken twice", ""),
    (checks.start_method("fork", "linux", None, 2), OK, "forked", ""),
    (checks.start_method("fork", "darwin", None, 2), WARNING, "macOS", "spawn"),
    (checks.start_method("spawn", "linux", lambda: 0, 2), ERROR, "can't be sent", "lambdas"),
    (checks.start_method("spawn", "linux", b"x" * 200_000_000, 2), WARNING, "200 MB", "fork"),
    (checks.start_method("forkserver", "linux", [1], 2), OK, "forkserver", ""),
    (checks.start_method("spawn", "linux", lambda: 0, 0), OK, "no loader workers", ""),
]


@pytest.mark.parametrize(("check", "status", "says", "remedy"), CASES)
def test_each_fault_is_one_line_with_its_remedy(check: Check, status: str, says: str, remedy: str) -> None:
    assert check.status == status
    assert says in check.text
    assert remedy in check.remedy
    assert bool(check.remedy) == (status != OK)


def test_the_disk_is_timed_by_whole_files_until_enough_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / str(number) for number in range(10)]
    for file in files:
        file.write_bytes(b"x" * 1000)
    seconds = iter(range(100))
    assert doctor.timed_reads(iter(files[:2]), lambda: float(next(seconds))) == (1000.0, 1000.0)
    monkeypatch.setattr(doctor, "READ", 3500)
    monkeypatch.setattr(doctor, "READ_SECONDS", 100.0)
    seconds = iter(range(100))
    assert doctor.timed_reads(iter(files), lambda: float(next(seconds))) == (1000.0, 1000.0)
    assert next(seconds) == 8  # four files
    assert doctor.timed_reads(iter([]), lambda: 0.0) == (None, None)


def test_labels_are_counted_where_a_data_set_has_them() -> None:
    class Labelled:
        labels = (0, 2, 2)

    assert doctor.class_counts(Labelled(), 4) == [1, 0, 2, 0]
    assert doctor.class_counts(object(), 4) == []


def doctor_says(*arguments: str) -> tuple[int, str]:
    return launch([sys.executable, "-m", "fasttrain", "doctor", *arguments], HOME)


def test_this_machine_is_fit_and_two_processes_find_each_other(images: Path) -> None:
    code, output = doctor_says(f"data.path={images}", "data.batch_size=6", "data.workers=1")
    assert code == 0, output
    found: dict[str, Any] = {line[8:22].strip(): line[:8].strip() for line in output.splitlines() if line[:1] != " "}
    assert set(found) >= {"device", "NVML", "cores", "open files", "memory", "shared memory", "start method", "classes"}
    assert {found[name] for name in ("memory", "classes", "batches", "checkpoints", "processes")} == {OK}, output
    assert "2 processes over gloo found each other" in output


def test_an_error_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, output = doctor_says(f"data.path={tmp_path / 'empty'}")
    assert (code, "error   data" in output) == (1, True), output


def test_whatever_the_data_set_raises_is_a_line_with_its_place(changed_project: Callable[[str, str], Path]) -> None:
    home = changed_project(
        "data.py", "def _broken(self, index):\n    return {}['label']\n\nImages.__getitem__ = _broken"
    )
    code, output = launch([sys.executable, "-m", "fasttrain", "doctor"], home)
    assert code == 1
    assert "Traceback" not in output
    assert "error   data           KeyError: 'label' (data.py, line " in output, output


def test_a_sample_may_be_nested() -> None:
    image = np.zeros((4, 5, 3), np.uint8)
    assert doctor.bytes_of((image, 3)) == 60 + 8
    assert doctor.bytes_of({"image": torch.from_numpy(image), "boxes": [image, {"id": np.int32(1)}]}) == 124
