"""Records: files that can always be read, and a training that goes on whatever the disk or a view does."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import until
from loguru import logger

from fasttrain import records
from fasttrain.records import BatchRecord, Recorder

PROJECT = Path(__file__).resolve().parents[1]


def record(step: int = 1, loss: Any = 0.5) -> BatchRecord:
    return BatchRecord(0, step, step * 0.1, 0.1, 0.02, 0.01, 0.03, 0.02, 0.01, 0.01, 64, loss, 0.1)


def lines(file: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


@pytest.fixture
def warned() -> Any:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING", format="{message}")
    yield said
    logger.remove(sink)


class Shown:
    def __init__(self) -> None:
        self.records: list[BatchRecord] = []
        self.events: list[dict[str, Any]] = []
        self.draws = self.closed = 0
        self.threads: set[str] = set()

    def batches(self, records: list[BatchRecord]) -> None:
        self.records += records
        self.threads.add(threading.current_thread().name)

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def draw(self, now: float) -> None:
        self.draws += 1

    def close(self) -> None:
        self.closed += 1


class Broken(Shown):
    def batches(self, records: list[BatchRecord]) -> None:
        raise RuntimeError("planted in the view")


def test_each_batch_is_a_line_and_reaches_the_views_off_the_training_thread(tmp_path: Path) -> None:
    view = Shown()
    with Recorder(tmp_path, 3, time.time() - 100, [view]) as recorder:
        for step in range(1000):
            recorder.batch(record(step, torch.tensor(step / 4)))
        recorder.event("pause", name="validation", seconds=torch.tensor(1.5))
    written = lines(tmp_path / "rank3.jsonl")
    assert [line["step"] for line in written] == list(range(1000))
    assert [line["loss"] for line in written] == [step / 4 for step in range(1000)]
    assert written[1] == {name: value for name, value in record(1, 0.25)._asdict().items() if value is not None}
    (event,) = lines(tmp_path / "events3.jsonl")
    assert 100 <= event.pop("time") < 200
    assert event == {"event": "pause", "name": "validation", "seconds": 1.5}
    assert [shown.loss for shown in view.records] == [step / 4 for step in range(1000)]
    assert view.threads == {"recorder"}
    assert (len(view.events), view.closed) == (1, 1)
    assert view.draws >= 1


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    with Recorder(tmp_path, 0, time.time()) as recorder:
        recorder.batch(record(1, torch.tensor(math.nan)))
        recorder.event("validation", loss=math.inf, accuracy=0.5)
    (batch,) = lines(tmp_path / "rank0.jsonl")
    assert (batch["loss"], batch["loss_text"], batch["lr"]) == (None, "nan", 0.1)
    (event,) = lines(tmp_path / "events0.jsonl")
    assert (event["loss"], event["loss_text"], event["accuracy"]) == (None, "inf", 0.5)


def test_a_loss_that_is_not_a_number_costs_only_the_loss(tmp_path: Path, warned: list[str]) -> None:
    with Recorder(tmp_path, 0, time.time()) as recorder:
        for step in range(3):
            recorder.batch(record(step, torch.zeros(2)))
    assert [("loss" in line, line["step"]) for line in lines(tmp_path / "rank0.jsonl")] == [
        (False, 0),
        (False, 1),
        (False, 2),
    ]
    assert len(warned) == 1


def test_a_view_that_raises_is_dropped_with_one_warning(tmp_path: Path, warned: list[str]) -> None:
    view = Shown()
    with Recorder(tmp_path, 0, time.time(), [Broken(), view]) as recorder:
        for step in range(3):
            recorder.batch(record(step))
            recorder._drain()
    assert [shown.step for shown in view.records] == [0, 1, 2]
    assert len(lines(tmp_path / "rank0.jsonl")) == 3
    assert len(warned) == 1
    assert "Broken" in warned[0]
    assert "Traceback" in warned[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_counted_and_said_twice(tmp_path: Path, warned: list[str]) -> None:
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    view = Shown()
    with Recorder(tmp_path, 0, time.time(), [view]) as recorder:
        for step in range(30):
            recorder.batch(record(step))
            if step % 10 == 0:
                recorder._drain()
    assert len(view.records) == 30
    assert recorder.lost == 30
    assert len(warned) == 2
    assert "can't write" in warned[0]
    assert "30 records are missing" in warned[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a FIFO, a file whose writers wait for a reader")
def test_a_blocked_disk_holds_up_neither_the_training_nor_the_end(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PATIENCE", 0.5)
    monkeypatch.setattr(records, "CAP", 5000)
    os.mkfifo(tmp_path / "rank0.jsonl")
    pipe = os.open(tmp_path / "rank0.jsonl", os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):  # full: the next writer waits
        while True:
            os.write(pipe, b"x" * 4096)
    view = Shown()
    recorder = Recorder(tmp_path, 0, time.time(), [view])
    recorder.batch(record(0))
    until(lambda: view.records)  # taken; the thread now stands in the write
    for step in range(6000):
        recorder.batch(record(step))
    recorder.close()
    assert view.closed == 1
    assert recorder.lost >= 6000
    assert "the disk is blocked" in warned[-1]

    def let_go() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 1 << 20)
        return not recorder._thread.is_alive()

    until(let_go)
    os.close(pipe)


def test_more_records_than_can_wait_are_dropped_and_counted(
    tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CAP", 10)
    monkeypatch.setattr(records, "EVERY", 60)
    with Recorder(tmp_path, 0, time.time()) as recorder:
        for step in range(25):
            recorder.batch(record(step))
    assert len(lines(tmp_path / "rank0.jsonl")) == 10
    assert recorder.lost == 15
    assert len(warned) == 2
    assert "further ones are dropped" in warned[0]
    assert "15 records are missing" in warned[1]


KILLED = """
import sys, time
from pathlib import Path
from fasttrain import records
from fasttrain.records import BatchRecord, Recorder
records.EVERY = 0.001
recorder = Recorder(Path(sys.argv[1]), 0, time.time())
step = 0
while True:
    recorder.batch(BatchRecord(0, step, 0.1, 0.1, 0.02, 0.01, 0.03, 0.02, 0.01, 0.01, 64, 0.5, 0.1))
    step += 1
    time.sleep(0.0001)
"""


def test_a_killed_run_leaves_whole_lines_and_the_next_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "rank0.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=environment) as process:
        while not file.exists() or file.stat().st_size < 20_000:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    with file.open("a") as torn:
        torn.write('{"epoch":0,"st')  # the worst a kill can leave
    with Recorder(tmp_path, 0, time.time()) as recorder:
        recorder.batch(record(77))
    text = file.read_text().splitlines()
    assert text[-2].endswith('{"epoch":0,"st')
    steps = [json.loads(line)["step"] for line in text if line != text[-2]]
    assert steps == [*range(len(steps) - 1), 77]
