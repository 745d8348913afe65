"""What the tests share: a small image folder, and training runs as processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from fasttrain import saver, shapes
from fasttrain.snapshot import Skeleton

HOME = Path(__file__).resolve().parents[1]
TIME_LIMIT = 170  # seconds for a whole run: a hang becomes a failure
QUICK = (
    "data.image_size=24",
    "data.batch_size=6",
    "data.workers=0",
    "train.epochs=1",
    "optimizer.lr=0.02",
    "optimizer.warmup_steps=2",
)

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass
class Finished:
    """A run that has ended."""

    code: int
    output: str
    dir: Path

    def records(self, rank: int = 0) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.dir / f"rank{rank}.jsonl").read_text().splitlines()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.dir / "events0.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def checkpoint(self, name: str = "last.pt") -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self.dir / name, weights_only=True)
        return content


def launch(command: list[str], cwd: Path, **environment: str) -> tuple[int, str]:
    """Run a command on the CPU to its end; stdout and stderr together."""
    changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **changed},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    return done.returncode, done.stdout


Train = Callable[..., Finished]


@pytest.fixture
def train(images: Path, tmp_path: Path) -> Train:
    """Train on the small folder: ``train("name", "key=value", ..., processes=2)``."""

    def run(name: str, *settings: str, processes: int = 1, home: Path = HOME, **environment: str) -> Finished:
        directory = tmp_path / name
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        arguments = [str(home / "train.py"), *QUICK, f"data.path={images}", f"run.dir={directory}", *settings]
        command = [sys.executable, *(launcher if processes > 1 else []), *arguments]
        return Finished(*launch(command, tmp_path, **environment), directory)

    return run


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What loguru is given, a line each."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What a command does to this process's signals, for it ends soon, must not reach the next test."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 training and 8 validation images of 8 classes."""
    root = tmp_path_factory.mktemp("images") / "shapes"
    shapes.draw(root, seed=1, train_per_class=8, val_per_class=1)
    return root


def save(path: Path, content: dict[str, Any]) -> None:
    """A checkpoint, written in this thread."""
    skeleton = Skeleton(content)
    saver.write(path, skeleton.bytes, [size for _, size in skeleton.records], skeleton.contents())


def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Wait until it is so; a hang becomes a failure."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not so after {seconds:g} s"
        time.sleep(0.01)


def copy_project(folder: Path) -> Path:
    """A copy of the project, to be changed."""
    ignored = shutil.ignore_patterns("tests", "data", "runs", "__pycache__", ".*")
    return Path(shutil.copytree(HOME, folder / "project", ignore=ignored))


@pytest.fixture
def changed_project(tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of the project in which one of the owner's files has some lines added at its end."""

    def change(file: str, lines: str) -> Path:
        home = copy_project(tmp_path)
        path = home / file
        path.write_text(path.read_text() + "\n" + lines)
        return home

    return change
