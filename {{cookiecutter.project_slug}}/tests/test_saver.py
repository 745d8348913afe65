"""The process that writes checkpoints: whatever kills it or its parent, the file is the old or the new one, whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from fasttrain import checkpoint, saver
from fasttrain.snapshot import Skeleton, Snapshot
from fasttrain.writer import Saver

NUMBERS = 250_000  # of a state: 1 MB

# A parent without torch, so that it is there at once: it fills the memory with 1, 2, ... and has each saved, for ever.
PARENT = """
import json, mmap, os, subprocess, sys
from array import array
path, skeleton, size = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
fd = os.memfd_create("test")
os.ftruncate(fd, size)
memory = mmap.mmap(fd, size)
command = [sys.executable, "-I", "-S", sys.argv[4], str(os.getpid()), str(fd), str(size)]
saver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,))
print(saver.pid, flush=True)
if len(sys.argv) > 5 and os.fork() == 0:  # a loader worker, which holds the pipe to the saver open
    sys.stdin.read()
    os._exit(0)
folder, name = os.path.split(path)
value = 0
while True:
    value += 1
    memory[:] = array("f", [value]).tobytes() * (size // 4)
    files = [["best.pt", None], [name, "last.previous.pt"]]
    request = {"folder": folder, "files": files, "records": [[0, size]], "skeleton": len(skeleton)}
    saver.stdin.write(json.dumps(request).encode() + b"\\n" + skeleton)
    saver.stdin.flush()
    saver.stdout.readline()
    print(value, flush=True)
"""


def whole(path: Path) -> float:
    """The value that all numbers of the file have."""
    values = checkpoint.load(path)["values"].unique()
    assert len(values) == 1, f"a mixture of {len(values)} states"
    return float(values)


@contextmanager
def saving(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A parent that saves again and again, and its saver."""
    skeleton = Skeleton({"values": torch.zeros(NUMBERS)})
    arguments = [str(folder / "last.pt"), skeleton.bytes.hex(), str(skeleton.size), saver.__file__, *more]
    command = [sys.executable, "-c", PARENT, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        try:
            yield parent, process
        finally:
            parent.kill()


def is_gone(process: psutil.Process, seconds: float = 30) -> bool:
    try:
        return bool(psutil.wait_procs([process], timeout=seconds)[0]) or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")
def test_six_kills_at_random_moments_leave_the_old_or_the_new_file(tmp_path: Path) -> None:
    draw = random.Random(0)
    for kill in range(6):
        with saving(tmp_path) as (parent, process):
            assert parent.stdout is not None
            assert parent.stdout.readline() == "1\n"
            time.sleep(draw.uniform(0, 0.1))
            (parent if kill % 2 else process).kill()
            parent.kill()
            assert is_gone(process), "it outlives its parent"
        for name in ("last.pt", "best.pt"):
            assert whole(tmp_path / name) >= 1
        previous = tmp_path / "last.previous.pt"
        assert not previous.exists() or whole(previous) >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")
def test_it_ends_with_its_parent_though_another_process_holds_their_pipe_open(tmp_path: Path) -> None:
    with saving(tmp_path, "forks") as (parent, process):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        parent.kill()
        assert is_gone(process, 20)


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")
def test_signals_to_the_whole_group_do_not_reach_it(tmp_path: Path) -> None:
    with saving(tmp_path) as (parent, process):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            process.send_signal(number)
        then = whole(tmp_path / "last.pt")
        # Values whose saving began after the signals; without a saver the parent can't go on, and its output ends.
        assert any(float(line) > then + 1 for line in parent.stdout)
        assert not is_gone(process, 0)


def test_it_starts_without_torch_and_without_the_project() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules, 'fasttrain' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, saver.__file__], capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_it_gives_way_to_the_training(tmp_path: Path) -> None:
    skeleton = Skeleton({"values": torch.ones(10)})
    snapshot = Snapshot(skeleton.size)
    one = Saver(snapshot)
    try:
        snapshot.take(skeleton)
        answer = one.write(tmp_path, [("last.pt", None)], skeleton)
        assert answer["last.pt"]["bytes"] == (tmp_path / "last.pt").stat().st_size
        if one.process is not None:
            assert psutil.Process(one.process.pid).nice() >= saver.NICE
    finally:
        one.close()


class Pins:
    """Stands for the device driver."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: dict[int, int] = {}

    def pin(self, address: int, size: int) -> None:
        if self.refuses:
            raise RuntimeError("no more")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def test_on_an_accelerator_the_memory_is_pinned_once_and_given_back(logged: list[str]) -> None:
    pins = Pins()
    snapshot = Snapshot(1000, pins)
    assert pins.pinned == {snapshot.bytes.data_ptr(): 1000}
    snapshot.take(Skeleton({"a": torch.ones(5)}))
    del snapshot
    assert pins.pinned == {}
    assert Snapshot(1000, Pins(refuses=True)).size == 1000
    assert len(logged) == 1
    assert "can't be pinned" in logged[0]
