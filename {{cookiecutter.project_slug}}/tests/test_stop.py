"""A signal to any rank ends all of them at the same point."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import until
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fasttrain import stop
from fasttrain.errors import UserError
from fasttrain.stop import Stop, Stopped


class Rank:
    """A rank as a thread: steps of random length, every one a sum over the ranks, which none leaves before all came."""

    def __init__(self, rank: int, world: int, store: Any, lead: int = 0) -> None:
        self.stop = Stop()
        self.stop.rank, self.stop.world, self.stop._store = rank, world, store
        self.stop._here, self.there = socket.socketpair()
        self.stop._before = {signal.SIGTERM: None, signal.SIGINT: None}
        self.stop._training = True
        setattr(self.stop, "_end_process", lambda text, in_order: self.stop.abort(text))  # noqa: B010  # not this one's
        self.rank, self.draw = rank, random.Random(rank)
        self.ended: int | None = None
        self.error: BaseException | None = None
        self.saved_at: list[int] = []
        self.stop.save = lambda: self.saved_at.append(self.stop.passed)

    def train(self, gate: threading.Barrier | None, points: int) -> None:
        try:
            for _ in range(points):
                time.sleep(self.draw.uniform(0, 0.01))
                if gate is not None:
                    gate.wait(20)
                self.stop.check()
        except (Stopped, UserError, threading.BrokenBarrierError) as error:
            self.error = error
        self.ended = self.stop.passed

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.there.send(bytes([number]))

    def close(self) -> None:
        self.stop._closed.set()
        self.stop._thread.join()
        self.stop._here.close()
        self.there.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(stop, "EVERY", 0.02)
    store = HashStore()
    found = [Rank(rank, 3, store) for rank in range(3)]
    yield found
    for rank in found:
        rank.close()


def run(ranks: list[Rank], gate: threading.Barrier | None, signals: dict[int, int], points: int = 100_000) -> None:
    threads = [threading.Thread(target=rank.train, args=(gate, points), daemon=True) for rank in ranks]
    for rank, thread in zip(ranks, threads, strict=True):
        rank.stop._thread.start()
        thread.start()
    time.sleep(0.05)
    for number_of, number in signals.items():
        ranks[number_of].signal(number)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize("signals", [{1: signal.SIGTERM}, {0: signal.SIGINT}, dict.fromkeys(range(3), signal.SIGTERM)])
@pytest.mark.parametrize("coupled", [True, False])
def test_all_ranks_end_at_the_same_point_and_rank_0_saves_there(
    ranks: list[Rank], signals: dict[int, int], coupled: bool
) -> None:
    """Coupled as on a CPU, where a sum over the ranks holds the host; or running ahead of one another, as on GPUs."""
    run(ranks, threading.Barrier(3) if coupled else None, signals)
    assert len({rank.ended for rank in ranks}) == 1, [rank.ended for rank in ranks]
    assert ranks[0].saved_at == [ranks[0].ended]
    assert all(rank.saved_at == [] for rank in ranks[1:])
    number = next(iter(signals.values()))
    assert [rank.error.code for rank in ranks if isinstance(rank.error, Stopped)] == [128 + number] * 3


def test_a_rank_that_is_done_does_not_hold_up_the_others(ranks: list[Rank]) -> None:
    """The signal comes when the first ranks have passed the last point already."""
    for rank in ranks[:2]:
        rank.stop._thread.start()
        rank.train(None, 5)
        rank.stop.over()
        rank.stop._closed.set()  # and gone
        rank.stop._thread.join()
    ranks[2].stop._thread.start()
    ranks[2].signal()
    until(lambda: ranks[2].stop._frozen)
    ranks[2].train(None, 5)
    assert [rank.ended for rank in ranks] == [5, 5, 5]
    assert [rank.error for rank in ranks] == [None] * 3


def test_a_rank_that_does_not_answer_is_named(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ANSWER", 0.2)
    run(ranks[:2], None, {0: signal.SIGTERM})
    for rank in ranks[:2]:
        assert isinstance(rank.error, UserError)
        assert "rank 2 doesn't answer" in str(rank.error)
    ranks[2].stop._thread.start()


def test_a_training_that_does_not_come_to_its_end_is_ended(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    ended: list[str] = []
    rank = ranks[0]
    rank.stop.world, rank.stop._store, rank.stop.seconds = 1, None, 0.1

    def end(text: str, in_order: bool) -> None:
        ended.append(text)
        rank.stop._closed.set()

    monkeypatch.setattr(rank.stop, "_end_process", end)
    rank.signal()
    rank.stop._thread.start()
    rank.stop._thread.join(20)
    assert "not ended 0.1 s after the signal" in ended[0]
    for other in ranks[1:]:
        other.stop._thread.start()


def test_a_second_ctrl_c_ends_a_main_thread_that_is_stuck_outside_of_python(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's handler never runs then: only the numbers on the socket tell of the signals."""
    ended: list[str] = []
    one = ranks[0]
    one.stop.world, one.stop._store = 1, None
    monkeypatch.setattr(stop, "BY_ITSELF", 0.0)

    def end(text: str, in_order: bool) -> None:
        ended.append(text)
        one.stop._closed.set()

    monkeypatch.setattr(one.stop, "_end_process", end)
    one.signal(signal.SIGINT)
    one.signal(signal.SIGINT)
    one.stop._thread.start()
    one.stop._thread.join(20)
    assert ended == ["ended at once by a second Ctrl-C"]
    for other in ranks[1:]:
        other.stop._thread.start()


def test_closing_does_not_wait_for_a_thread_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a store that does not answer."""
    monkeypatch.setattr(stop, "LAST_WORDS", 0.1)
    one, answer = Stop(), threading.Event()
    one.listen()
    monkeypatch.setattr(one, "_agree", answer.wait)
    one.begin(0, 1, "token")
    closing = threading.Thread(target=one._end_thread, daemon=True)
    closing.start()
    closing.join(20)
    stuck = closing.is_alive()
    answer.set()
    one.close()
    assert not stuck


def test_validation_is_given_up_where_all_ranks_can(ranks: list[Rank]) -> None:
    one = ranks[0].stop
    one.world, one._store = 1, None
    one._thread.start()
    seen = []

    def validate() -> None:
        for item in one.until_stopped(range(1000)):
            seen.append(item)
            if item == 3:
                ranks[0].signal()
                while one._until is None:
                    time.sleep(0.01)

    with pytest.raises(Stopped):
        validate()
    assert seen == [0, 1, 2, 3]
    assert one.passed == 1
    for other in ranks[1:]:
        other.stop._thread.start()


def test_what_rank_0_tells_stands_in_the_logs_of_the_others(ranks: list[Rank], logged: list[str]) -> None:
    for rank in ranks:
        rank.stop._thread.start()
    ranks[0].stop.tell("the disk is full")
    until = time.monotonic() + 20
    while len(logged) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert [line.strip() for line in logged] == ["the disk is full"] * 2


@pytest.fixture
def listening() -> Iterator[Stop]:
    one = Stop()
    one.listen()
    yield one
    one.close()


def test_before_the_training_a_signal_ends_at_once_and_in_it_the_second_ctrl_c(listening: Stop) -> None:
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    listening.begin(0, 1, "token")
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_sigusr1_is_held_back_from_what_is_started_and_collected_here(listening: Stop) -> None:
    assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    listening.begin(0, 1, "token")
    os.kill(os.getpid(), signal.SIGUSR1)
    until = time.monotonic() + 20
    while listening._until is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(Stopped) as stopped:
        listening.check()
    assert stopped.value.code == 128 + signal.SIGUSR1


def test_a_signal_to_a_forked_process_is_not_taken_for_one_to_this(listening: Stop) -> None:
    listening.begin(0, 1, "token")
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(3 * stop.EVERY)
    assert listening.asked is None


def test_a_signal_that_somebody_else_has_taken_over_stays_theirs() -> None:
    """A process that failed ignores the launcher's SIGTERM, to end with its own exit code."""
    before = signal.getsignal(signal.SIGTERM)
    one = Stop()
    one.listen()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        one.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) != one._heard
    finally:
        signal.signal(signal.SIGTERM, before)
