"""The stopwatch: every moment belongs to one phase of one batch, or to a pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.clock import HostClock
from fasttrain.records import PHASES, BatchRecord
from fasttrain.transfer import Batch
from fasttrain.watch import Watch


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[BatchRecord] = []
        self.events: list[dict[str, Any]] = []

    def batch(self, record: BatchRecord) -> None:
        self.records.append(record)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append({"event": kind, **fields})

    def paused(self) -> float:
        return float(sum(e["seconds"] for e in self.events if e["event"] == "pause" and e["name"] != "startup"))


class Script:
    """A clock that moves only when told to `spend` time. Also plays a device that runs behind its queue of work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = float("inf")  # how far the device has come
        self.settled = 0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def stamp(self) -> float:
        return self.now

    def passed(self, stamp: float) -> bool:
        return stamp <= self.done

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def settle(self) -> None:
        self.settled += 1
        self.done = float("inf")


def batch(number: int, copied: tuple[float, float] | None = None) -> Batch:
    return Batch((torch.zeros(4),), [1, 2, 3, 4], 0, number, 9, 0, 0.01, 1, 2, copied)


def source(clock: Script, count: int, wait: float = 0.1) -> Iterator[Batch]:
    for number in range(count):
        clock.spend(wait)
        yield batch(number)


def run_loop(clock: Script, watch: Watch, planted: dict[str, float], count: int = 3) -> None:
    for _ in watch.batches(source(clock, count, 0.1 + planted.get("wait", 0))):
        for phase in ("forward", "backward", "optimizer"):
            clock.spend(1 + planted.get(phase, 0))
            watch.mark(phase)
        clock.spend(0.5 + planted.get("other", 0))
        watch.note(7, torch.tensor(2.0), 0.1)


@pytest.mark.parametrize("phase", ["wait", "forward", "backward", "optimizer", "other"])
def test_time_planted_in_a_phase_appears_there_and_nowhere_else(phase: str) -> None:
    plain, planted = Kept(), Kept()
    for sink, extra in ((plain, {}), (planted, {phase: 0.05})):
        clock = Script()
        run_loop(clock, Watch(sink, clock, time.time(), time.time()), extra)
    for before, after in zip(plain.records, planted.records, strict=True):
        for name in PHASES:
            assert getattr(after, name) - getattr(before, name) == pytest.approx(0.05 if name == phase else 0)
        assert after.wall == pytest.approx(sum(getattr(after, name) for name in PHASES))


def test_time_planted_in_a_phase_with_the_real_clock() -> None:
    sink = Kept()
    watch = Watch(sink, HostClock(), time.time(), time.time())
    for _ in watch.batches(batch(i) for i in range(2)):
        watch.mark("forward")
        time.sleep(0.05)
        watch.mark("backward")
        watch.mark("optimizer")
    for record in sink.records:
        assert record.backward >= 0.05


def test_batches_and_pauses_add_up_to_the_whole_time() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    for _ in range(3):
        run_loop(clock, watch, {})
        clock.spend(0.3)  # between the epochs, in no pause: belongs to the next batch
        with watch.pause("validation"):
            clock.spend(5)
    run_loop(clock, watch, {})
    watch.close()
    assert sum(r.wall for r in sink.records) + 3 * 5 == pytest.approx(clock.now)
    assert len(sink.records) == 12


def test_a_pause_within_a_batch_is_not_its_time() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    for _ in watch.batches(source(clock, 2)):
        clock.spend(1)
        watch.mark("forward")
        with watch.pause("checkpoint"):
            clock.spend(9)
        clock.spend(0.25)
    assert [round(r.wall, 6) for r in sink.records] == [1.35, 1.35]
    assert sink.records[0].other == pytest.approx(0.25)
    assert [e["name"] for e in sink.events if e["event"] == "pause"] == ["startup", "checkpoint", "checkpoint"]


def test_a_deleted_mark_gives_its_time_to_the_next() -> None:
    sink, clock = Kept(), Script()
    for _ in (watch := Watch(sink, clock, time.time(), time.time())).batches(source(clock, 1)):
        clock.spend(1)
        clock.spend(2)
        watch.mark("backward")
    assert sink.records[0].forward == 0
    assert sink.records[0].backward == pytest.approx(3)


def test_breaking_out_of_the_loop_keeps_the_batch() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    for _ in watch.batches(source(clock, 3)):
        clock.spend(1)
        watch.mark("forward")
        break
    watch.close()
    assert [r.forward for r in sink.records] == [1]


def test_what_is_noted_stands_in_the_record_and_only_there() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    for got in watch.batches(source(clock, 2)):
        if got.number == 0:
            watch.note(3, torch.tensor(2.0), 0.1)
    first, second = sink.records
    assert (first.step, float(first.loss), first.lr) == (3, 2.0, 0.1)
    assert (second.loss, second.lr) == (None, None)
    assert (first.images, first.worker, first.ready, first.made) == (4, 1, 2, 0.01)


@pytest.mark.parametrize("cuda", [True, False])
def test_only_on_cuda_a_loss_is_copied_without_waiting(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record waits for an event there; elsewhere it may be read at once."""
    copied: list[bool] = []
    host = SimpleNamespace(copy_=lambda loss, non_blocking: copied.append(non_blocking))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: host)
    loss: Any = SimpleNamespace(is_cpu=False, is_cuda=cuda, dtype=torch.float32, grad_fn=None)
    loss.detach = lambda: loss
    Watch(Kept(), HostClock(), 0, 0).note(1, loss, 0.1)
    assert copied == [cuda]


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="forwards"):
        Watch(Kept(), HostClock(), 0, 0).mark("forwards")


# ---- a device that runs behind its queue of work


def test_records_wait_for_the_device_and_nothing_waits_in_a_step() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    clock.done = 0.0
    run_loop(clock, watch, {}, count=4)
    assert sink.records == []
    assert clock.settled == 0, "a step made the host wait for the device"
    clock.done = 7.3  # the device has done two batches of 3.6 s
    for _ in watch.batches(source(clock, 1)):
        pass
    assert len(sink.records) == 2
    assert all(r.host_wall is not None and r.host_wall < 1 < r.wall for r in sink.records), "the host ran ahead"
    watch.close()
    assert len(sink.records) == 5


def test_a_failed_training_does_not_wait_for_the_device() -> None:
    sink, clock = Kept(), Script()
    watch = Watch(sink, clock, time.time(), time.time())
    clock.done = 4.0
    for got in watch.batches(source(clock, 3)):
        clock.spend(3)
        if got.number == 1:
            break
    watch.abandon()
    assert clock.settled == 0
    assert len(sink.records) == 1


@pytest.mark.parametrize(
    ("copied", "copy", "wait"),
    [
        ((-5.0, -1.0), 0.0, 1.0),  # done before the device was free: it overlapped with compute
        ((-0.5, 0.25), 0.25, 0.75),  # the end of the copy was waited for
        ((0.5, 0.8), 0.3, 0.7),  # the batch came late and was then copied
        ((0.7, 1.0), 0.3, 0.7),
        (None, 0.0, 1.0),
    ],
)
def test_copy_is_only_the_time_the_device_stood_idle_for_it(
    copied: tuple[float, float] | None, copy: float, wait: float
) -> None:
    sink, clock = Kept(), Script()
    clock.now = 10.0

    def one() -> Iterator[Batch]:
        clock.spend(1.0)
        yield batch(0, None if copied is None else (10 + copied[0], 10 + copied[1]))

    for _ in Watch(sink, clock, time.time(), time.time()).batches(one()):
        pass
    assert [sink.records[0].copy, sink.records[0].wait] == pytest.approx([copy, wait])
