"""What the verdict rests on is measured right: a batch's effort, where the training thread stands, a step's graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Train
from simulated import Made, Training, looks
from torch import nn

from fasttrain import effort, machine
from fasttrain.clock import HostClock
from fasttrain.dashboard import Dashboard, line
from fasttrain.effort import Meter, QueueTime, UsageClock
from fasttrain.errors import UserError
from fasttrain.evidence import side_of, sure_above
from fasttrain.graph import operations
from fasttrain.history import Rank
from fasttrain.judge import judge
from fasttrain.looks import Looks, place
from fasttrain.records import BatchRecord
from fasttrain.tools import judge as tool
from fasttrain.verdicts import RECENT, Follower, LiveVerdict
from fasttrain.watch import Watch
from fasttrain.window import Window


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


# ---- the effort of a batch


def test_a_batch_s_time_divides_into_work_sleep_and_its_slowest_samples() -> None:
    meter = Meter(alone=False)
    for seconds in (0.001, 0.001, 0.001, 0.001, 0.02):
        meter.sample(seconds)
    spin(0.05)
    time.sleep(0.1)
    found = meter.stop()
    assert 0.05 <= found.cpu <= found.seconds - 0.1
    assert found.slowest == found.tail == 0.02
    assert found.assembly == pytest.approx(found.seconds - 0.024)
    if sys.platform == "linux":
        assert found.queued is not None
        assert found.seconds - found.cpu - found.queued >= 0.05, "asleep"


def test_threads_of_the_data_set_count_as_work_of_the_worker() -> None:
    meter = Meter(alone=True)
    thread = threading.Thread(target=spin, args=(0.05,))
    thread.start()
    thread.join()
    assert meter.stop().cpu >= 0.05


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the time in the queue")
def test_waiting_for_a_core_is_told_from_sleeping() -> None:
    """Two processes on one core: each has to wait while the other runs."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as rival:
            try:
                time.sleep(0.3)
                queue = QueueTime()
                before = queue()
                spin(0.2)
                after = queue()
            finally:
                rival.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert before is not None
    assert after is not None
    assert after - before > 0.05


def test_a_worker_tells_now_and_then_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = UsageClock()
    first = clock.due(3)
    assert first is not None
    assert (first.worker, first.pid) == (3, os.getpid())
    assert first.private is not None
    assert 0 < first.private <= psutil.Process().memory_info().rss
    assert clock.due(3) is None
    monkeypatch.setattr(effort, "USAGE_EVERY", 0.0)
    clock = UsageClock()
    assert clock.due(3) is not None
    assert clock.due(3) is not None


def test_the_throttling_of_a_container_is_read(tmp_path: Path) -> None:
    def told(lines: str, files: dict[str, str]) -> float | None:
        for name, text in {"proc/self/cgroup": lines, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return machine.throttled(tmp_path)

    assert machine.throttled(tmp_path) is None
    assert told("0::/\n", {"sys/fs/cgroup/cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n"}) == 2.5
    assert told("4:cpu:/\n", {"sys/fs/cgroup/cpu/cpu.stat": "nr_throttled 7\nthrottled_time 1500000000\n"}) == 1.5


# ---- where the training thread stands


def test_a_look_names_phase_line_and_what_is_done_there() -> None:
    import logging

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(place(sys._getframe(), "other", {}))

    seen: list[tuple[str, str, str, str]] = []
    log = logging.getLogger("test_evidence")
    log.addHandler(Slow())
    log.error("x")
    ((phase, own, kind, innermost),) = seen
    assert (phase, kind) == ("other", "logging")
    assert own.startswith("test_evidence.py:")
    assert own.endswith(': log.error("x")')
    assert "emit" in innermost


def test_what_the_owner_calls_is_shown_at_his_line() -> None:
    def look(_: object) -> int:
        seen.append(place(sys._getframe().f_back, "forward", {}))  # inside the json module
        return 0

    seen: list[tuple[str, str, str, str]] = []
    json.dumps({1: object()}, default=look)
    ((phase, own, kind, innermost),) = seen
    assert (phase, kind) == ("forward", "")
    assert "json.dumps({1: object()}" in own
    assert "json/encoder.py" in innermost


def test_looks_are_summed_up_as_events_with_the_thread_s_own_time() -> None:
    events: list[dict[str, Any]] = []
    done = threading.Event()

    def told(kind: str, **fields: Any) -> None:
        events.append({"event": kind, **fields})
        done.set()

    with Looks(told, lambda: "backward"):
        assert done.wait(20)
    event = events[0]
    assert event["event"] == "looks"
    assert event["looks"] == sum(count for *_, count in event["at"]) > 0
    assert {phase for phase, *_ in event["at"]} == {"backward"}
    assert event["cpu"] is None or event["cpu"] < event["seconds"]


# ---- the step


def test_operations_of_a_step_are_counted_also_after_its_backward_pass() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x
    for _ in range(50):
        y = y * 2
    loss = y.sum()
    loss.backward()
    assert operations(loss) == 51
    assert operations(torch.zeros(())) == 0


def test_the_watch_tells_the_phase_and_the_thread_s_time_in_the_backward_pass() -> None:
    class Kept:
        def __init__(self) -> None:
            self.records: list[BatchRecord] = []
            self.events: list[str] = []

        def batch(self, record: BatchRecord) -> None:
            self.records.append(record)

        def event(self, kind: str, /, **fields: Any) -> None:
            self.events.append(kind)

    from test_watch import Script, source

    kept, phases = Kept(), []
    watch = Watch(kept, HostClock(), time.time(), time.time())
    phases.append(watch.doing)
    weight = nn.Parameter(torch.ones(()))
    for _ in watch.batches(source(Script(), 3)):
        phases.append(watch.doing)
        watch.mark("forward")
        phases.append(watch.doing)
        spin(0.02)
        time.sleep(0.05)
        watch.mark("backward")
        phases.append(watch.doing)
        watch.note(1, weight * 2, 0.1)
        with watch.pause("checkpoint"):
            phases.append(watch.doing)
    assert phases[:6] == ["wait", "forward", "backward", "optimizer", "pause", "forward"]
    assert kept.events.count("graph") == 1
    for record in kept.records:
        assert record.backward_cpu is not None
        assert 0.02 <= record.backward_cpu <= record.backward - 0.04


# ---- certainty


def test_a_share_is_sure_only_if_it_is_a_habit() -> None:
    once = [0.0] * 79 + [16.0]
    always = [0.2] * 80
    assert sure_above(once, [1.0] * 80, 0.1)[1] < 0.9
    share, sure = sure_above(always, [1.0] * 80, 0.1)
    assert share == pytest.approx(0.2)
    assert sure > 0.99
    assert sure_above([0.05] * 80, [1.0] * 80, 0.1)[1] < 0.1
    assert sure_above([], [], 0.1) == (0.0, 0.0)


def test_looks_of_pauses_and_of_the_start_are_left_out() -> None:
    rank = Training().rank()
    looks(rank, 0.5, "saving", phase="pause")
    rank.events.append(
        {"time": 4.0, "event": "looks", "looks": 20, "seconds": 1.0, "at": [["wait", "a", "logging", "b", 20]]}
    )
    side = side_of(rank)
    assert {look.kind for look in side.looks} == {""}
    assert len(side.records) == 200 - 3, "the warm-up: one more than there are workers"


# ---- live, and as a command


def _write(directory: Path, rank: Rank, records: int, cut: bool = False) -> None:
    lines = [json.dumps({k: v for k, v in r._asdict().items() if v is not None}) for r in rank.records[:records]]
    text = "\n".join(lines) + "\n"
    (directory / f"rank{rank.number}.jsonl").write_text(text[:-20] if cut else text)
    (directory / f"events{rank.number}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in rank.events))


def test_the_live_verdict_reads_the_other_ranks_while_they_write(tmp_path: Path) -> None:
    late = Training(forward=0.02).rank(1)
    own = Training(backward=0.02).rank(0)
    _write(tmp_path, late, 10, cut=True)
    live = LiveVerdict(tmp_path, 2, {})
    for event in own.events:
        live.event(event)
    live.batches(own.records)
    live.draw(10.0)
    _write(tmp_path, late, len(late.records))
    live.batches([])
    live.draw(11.0)
    assert "rank 1" not in (live.says or ""), "a few seconds lie between two judgements"
    live.batches([])
    live.draw(20.0)
    found = live.verdict(RECENT).findings[0]
    assert (found.cause, found.rank) == ("slow_rank", 1)
    assert "rank 1 is late" in (live.says or "")


def later(rank: Rank, seconds: float) -> Rank:
    """The same at another time of the run."""
    records = [record._replace(time=record.time + seconds) for record in rank.records]
    return Rank(rank.number, records, [{**event, "time": event["time"] + seconds} for event in rank.events])


def joined(*parts: Rank) -> Rank:
    """A training that was resumed."""
    records = [record for part in parts for record in part.records]
    return Rank(parts[0].number, records, [event for part in parts for event in part.events])


def test_a_resumed_training_compares_no_rank_with_what_another_did_before(tmp_path: Path) -> None:
    """The same steps done again, in which rank 1 is late; before, it was not."""
    own, slow = later(Training(backward=0.02).rank(0), 100), later(Training(forward=0.02).rank(1), 100)
    other = joined(Training().rank(1), slow)
    _write(tmp_path, other, len(other.records))
    live = LiveVerdict(tmp_path, 2, {})
    for event in own.events:
        live.event(event)
    live.batches(own.records)
    follower = Follower(tmp_path, 1)
    follower.read()
    assert follower.kept.rank(4000).records == slow.records
    lost = [joined(Training().rank(0), own), slow]  # rank 1's files did not survive the first time
    for verdict in (live.verdict(), judge(lost, {}, {})):
        assert verdict.findings
        assert (verdict.findings[0].cause, verdict.findings[0].rank) == ("slow_rank", 1)


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    rank = Training().rank(1)
    follower = Follower(tmp_path, 1)
    follower.read()  # nothing is there yet
    for records, cut in ((10, True), (10, False), (200, True), (200, False)):
        _write(tmp_path, rank, records, cut)
        follower.read()
    assert [record.step for record in follower.kept.records] == [record.step for record in rank.records]


def test_the_verdict_stands_on_the_dashboard() -> None:
    window = Window(100)
    window.add(Training().rank().records)
    board = Dashboard(5, window, None, None)
    summary = window.summary()
    assert summary is not None
    board.verdict = lambda: "there are too few loader workers"
    assert "there are too few loader workers" in line(summary, board)


def test_judge_prints_the_verdict_of_any_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, Training(workers=0, made=lambda batch, worker: Made(cpu=0.05)).rank(), 200)
    for form in ([], ["--last", "3"]):
        assert tool.main([str(tmp_path), *form]) == 0
        output = capsys.readouterr().out
        assert "loads its own data" in output
        assert "do: data.workers: 0 ->" in output
    assert tool.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["cause"] == "no_workers"
    with pytest.raises(UserError, match="holds no run"):
        tool.main([str(tmp_path / "none")])
    with pytest.raises(UserError, match="more than 0"):
        tool.main([str(tmp_path), "--last", "0"])


SLOW_SAMPLES = """
import time
_quick = Images.unfinished

def slow(self, index):
    time.sleep(0.04)
    return _quick(self, index)

Images.unfinished = slow
"""
LATE_ON_RANK_1 = """
import os, time

class StandIn(StandIn):
    def forward(self, images):
        time.sleep(0.25 if os.environ["RANK"] == "1" else 0)
        return super().forward(images)
"""
DEVICE = ("model.name=stand_in", "model.stand_in_ms=20", "train.epochs=3")
Change = Callable[[str, str], Path]


def test_a_training_ends_with_its_verdict(train: Train, changed_project: Change) -> None:
    run = train("slow", *DEVICE, home=changed_project("data.py", SLOW_SAMPLES))
    assert run.code == 0, run.output
    assert "verdict: the training process loads its own data" in run.output
    assert "do: data.workers: 0 -> " in run.output
    assert f"next: python -m fasttrain report {run.dir}" in run.output
    (loader,) = run.events("loader")
    assert (loader["workers"], loader["slots"], loader["types"]) == (0, True, ["uint8", "int64"])
    record = run.records()[-1]
    assert record["made"] - record["made_cpu"] > 0.04


def test_the_slow_rank_of_a_training_is_named(train: Train, changed_project: Change) -> None:
    home = changed_project("model.py", LATE_ON_RANK_1)
    run = train("late", *DEVICE, "train.epochs=6", processes=2, home=home)
    assert run.code == 0, run.output
    assert "rank 1 is late and the others wait for it; it spends longer in forward" in run.output
