"""A baked project trains: in one process, in two under torchrun, and it ends well when something is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

TIME_LIMIT = 180  # seconds for a whole process or group; a hang becomes a failure
PHASES = ("wait", "copy", "forward", "backward", "optimizer", "other")
IMAGES = 32  # for training, in two classes; 4 batches of 8
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

# Runs train.py, as torchrun would, with a fault planted in the second backward pass of rank 1.
FAILING_RANK = """
import os, runpy, sys
import torch

calls = 0
backward = torch.autograd.backward

def failing(*args, **kwargs):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 2:
        raise RuntimeError("planted failure")
    return backward(*args, **kwargs)

torch.autograd.backward = failing
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image folder with train/ and val/, two classes each."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, count in (("train", IMAGES // 2), ("val", 5)):
        for label, brightness in (("bright", 180), ("dark", 60)):
            (folder / split / label).mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(brightness - 50, brightness + 50, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{index}.jpg")
    return folder


def settings(images: Path, run: Path, *more: str) -> list[str]:
    return [
        f"data.path={images}",
        "data.image_size=32",
        "data.batch_size=8",
        "data.workers=1",
        "train.epochs=1",
        "optimizer.lr=0.01",
        "optimizer.warmup_steps=1",
        f"run.dir={run}",
        *more,
    ]


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a command on the CPU, from a folder that is not the project's."""
    tools = str(Path(sys.executable).parent)  # python and torchrun of this environment
    changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **changed, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def finish(process: subprocess.Popen[str], run: Path) -> tuple[int, str]:
    """The exit code and all the output. A process that hangs, or leaves others of its run behind, fails the test."""
    hangs = False
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        hangs = True
    named = psutil.process_iter(["cmdline"])
    left = [each for each in named if f"run.dir={run}" in (each.info["cmdline"] or [])]
    for each in left:
        each.kill()
    if hangs:
        output, _ = process.communicate()
    assert not hangs, f"not finished after {TIME_LIMIT} s:\n{output}"
    assert not left, f"still running: {left}\n{output}"
    return process.returncode, output


def python(run: Path, *arguments: str) -> tuple[int, str]:
    return finish(start(run.parent, sys.executable, *arguments), run)


def records(run: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = (run / "events0.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def keys_of(content: Any) -> set[str]:
    """Every name at any depth of a checkpoint."""
    if not isinstance(content, dict):
        return set()
    return {str(key) for key in content}.union(*(keys_of(inner) for inner in content.values()))


def assert_records(rows: list[dict[str, Any]], batches: int) -> None:
    assert len(rows) == batches
    for row in rows:
        assert set(row) >= {"epoch", "step", "time", "wall", "images", *PHASES}
        assert sum(row[phase] for phase in PHASES) == pytest.approx(row["wall"], abs=1e-4)
        assert all(row[phase] >= 0 for phase in PHASES)
        assert row["images"] == 8
    assert len({row["step"] for row in rows}) == batches
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert any("loss" in row for row in rows)
    assert any("lr" in row for row in rows)


def assert_checkpoints(run: Path) -> None:
    for name in ("best.pt", "last.pt"):
        content = torch.load(run / name, map_location="cpu", weights_only=True)
        assert len(keys_of(content)) > 10, name  # the weights are in there, by name
        wrapped = {key for key in keys_of(content) if key.startswith(("module.", "_orig_mod."))}
        assert not wrapped, name
    assert "best.pt" in {Path(event["file"]).name for event in events(run, "checkpoint")}
    assert len(events(run, "validation")) == 1


def test_one_process_trains(project: Path, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = python(run, str(project / "train.py"), *settings(images, run))
    assert code == 0, output
    assert_records(records(run, 0), IMAGES // 8)
    assert_checkpoints(run)


def test_two_processes_train(project: Path, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = python(run, *TORCHRUN, str(project / "train.py"), *settings(images, run))
    assert code == 0, output
    for rank in (0, 1):
        assert_records(records(run, rank), IMAGES // 8 // 2)
    assert_checkpoints(run)
    assert {path.name for path in run.glob("rank*.jsonl")} == {"rank0.jsonl", "rank1.jsonl"}


def test_one_machine_trains(project: Path, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = str(project / "launch" / "one_machine.sh")
    code, output = finish(start(tmp_path, script, *settings(images, run, "data.workers=0")), run)
    assert code == 0, output
    assert_checkpoints(run)


def test_several_machines_train(project: Path, images: Path, tmp_path: Path) -> None:
    """Two launchers that meet at an address, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    run = tmp_path / "run"
    command = [str(project / "launch" / "several_machines.sh"), "2", endpoint, *settings(images, run, "data.workers=0")]
    machines = [start(tmp_path, *command, NPROC="1") for _ in range(2)]
    first, _ = machines[0].communicate(timeout=TIME_LIMIT)
    code, second = finish(machines[1], run)
    assert (machines[0].returncode, code) == (0, 0), first + second
    for rank in (0, 1):
        assert_records(records(run, rank), IMAGES // 8 // 2)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.batch_size=0", ["data.batch_size=0", "at least 1"]),
        ("optimzer.lr=0.1", ["optimzer", "optimizer.lr"]),
        ("train.epochs=many", ["train.epochs=many"]),
        ("data.path=/no/such/folder", ["data.path=/no/such/folder"]),
    ],
)
def test_a_wrong_setting_is_one_line(
    project: Path, images: Path, tmp_path: Path, setting: str, words: list[str]
) -> None:
    run = tmp_path / "run"
    code, output = python(run, str(project / "train.py"), *settings(images, run, setting))
    assert code == 2
    lines = output.splitlines()
    assert len(lines) == 1, output
    assert all(word in lines[0] for word in words), lines[0]
    assert not run.exists()


def test_a_wrong_setting_is_said_once_under_torchrun(project: Path, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, output = python(run, *TORCHRUN, str(project / "train.py"), *settings(images, run, "data.batch_size=0"))
    assert code != 0
    ours, report, root = output.rpartition("Root Cause")  # of torchrun's report, with which the console ends
    assert report, output
    assert sum("data.batch_size=0: expected" in line for line in ours.splitlines()) == 1, output
    assert "data.batch_size=0: expected" in root, output


def test_a_failing_rank_ends_both(project: Path, images: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = tmp_path / "failing_rank.py"
    script.write_text(FAILING_RANK)
    arguments = settings(images, run, "data.workers=0", "data.batch_size=4")
    code, output = python(run, *TORCHRUN, str(script), str(project / "train.py"), *arguments)
    assert code != 0, output
    assert "planted failure" in output
