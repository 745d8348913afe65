"""A slot is never written while it is in use, whatever workers, start method and device; and nothing of it is left."""

from __future__ import annotations

import collections
import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from loguru import logger
from test_feed import Draws, data, seen
from torch.utils.data import Dataset

from fasttrain import feed as feeding
from fasttrain import host, seeding, slots
from fasttrain.errors import UserError
from fasttrain.feed import Feed
from fasttrain.sampler import ValidationBatches
from fasttrain.slots import Field, Slots, field_of, fields_of
from fasttrain.transfer import Batch, ahead

PREFETCH = 2


class Stamped(Dataset[Any]):
    """Each sample is full of its own number, so that a batch shows which samples its memory holds."""

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return np.full(300, index), index


class Odd(Stamped):
    """One sample has another shape."""

    def __getitem__(self, index: int) -> Any:
        return np.zeros((3, 8 if index != 21 else 7), np.uint8), index


class Made:
    """An array that is made once its place is known."""

    dtype = np.dtype(np.int64)

    def __init__(self, index: int, made: list[tuple[int, int]], size: int = 300) -> None:
        self.index, self.made, self.shape = index, made, (size,)

    def write(self, out: np.ndarray) -> None:
        if self.index == 3:
            raise UserError("sample 3 can't be made")
        out[...] = self.index + 1000
        self.made.append((self.index, out.ctypes.data))


class Unfinished(Stamped):
    """Leaves the array to be made in its place, and the number to be copied."""

    def __init__(self, other: int = -1) -> None:
        super().__init__()
        self.made: list[tuple[int, int]] = []
        self.drawn: list[float] = []
        self.other = other  # a sample of another size

    def unfinished(self, index: int) -> Any:
        self.drawn.append(random.random())
        self.made.append((-1, 0))
        return Made(index, self.made, 200 if index == self.other else 300), index


class Opening(Stamped):
    """Keeps something open, as a database, that another process must not use."""

    opened_by = 0

    def __getitem__(self, index: int) -> Any:
        self.opened_by = self.opened_by or os.getpid()
        if self.opened_by != os.getpid():
            raise UserError("opened before the fork")
        return super().__getitem__(index)


def make(dataset: Any, workers: int = 1, device: str = "cpu", **changes: Any) -> Feed:
    settings = data(**{"prefetch_factor": PREFETCH, **changes})
    place: dict[str, Any] = {"seed": 5, "rank": 0, "world": 1, "device": torch.device(device)}
    return Feed(dataset, Stamped(7), settings, workers=workers, epochs=2, **place)


def whole(batch: Batch) -> bool:
    return bool(batch.tensors[0][:, 0].tolist() == batch.indices == batch.tensors[1].tolist())


def let_workers_finish(feed: Feed) -> None:
    """Until they have made all that was asked of them."""
    until = time.monotonic() + 20
    while feed.workers and (feed.ready() or 0) < PREFETCH * feed.workers:
        assert time.monotonic() < until, "the workers make no batches"
        time.sleep(0.001)


def held(feed: Feed) -> list[bool]:
    """Whether each batch was whole when the next one was in use, the workers having done all they may."""
    found, before = [], None
    for batch in feed.train(0):
        let_workers_finish(feed)
        found += [whole(batch), before is None or whole(before)]
        before = batch
    feed.close()
    return found


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_batch_stays_whole_while_the_next_one_is_in_use(workers: int) -> None:
    assert all(held(make(Stamped(), workers)))


@pytest.mark.parametrize("workers", [0, 1])
def test_one_slot_fewer_would_not_do(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "SPARE", slots.SPARE - 1)
    assert not all(held(make(Stamped(), workers)))


class LateCopies:
    """Streams whose copies read the batch at the last moment: when the host waits for them."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def copy(self, tensors: Any) -> tuple[Any, Any, Any]:
        moved: list[torch.Tensor] = []
        return moved, None, (tensors, moved)

    def hand_over(self, tensors: Any, copied: Any) -> None:
        return None

    def wait(self, copied: Any) -> None:
        let_workers_finish(self.feed)
        source, moved = copied
        moved.extend(tensor.clone() for tensor in source)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_slot_is_written_again_only_after_its_copy(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make(Stamped(), workers)
    monkeypatch.setattr(feeding, "to_device", lambda batches, *where: ahead(batches, LateCopies(feed)))
    batches = list(feed.train(0))
    assert len(batches) == 15
    assert all(whole(batch) for batch in batches)
    feed.close()


def test_copies_have_passed_when_a_loop_is_left_early(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make(Stamped())
    monkeypatch.setattr(feeding, "to_device", lambda batches, *where: ahead(batches, LateCopies(feed)))
    stream = feed.train(0)
    first = next(stream)
    stream.close()  # type: ignore[attr-defined]  # what a break comes to
    assert whole(first)
    assert [index for batch in feed.train(0, start=4) for index in batch.indices][:4] != first.indices
    feed.close()


class Named(NamedTuple):
    image: Any
    label: int


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ({"image": np.zeros(3)}, "a sample is a dict"),
        (Named(np.zeros(3), 1), "a sample is a Named"),
        ((np.zeros(3), "cat.jpg"), "item 1 of a sample is a str"),
        ((torch.zeros(3, dtype=torch.bfloat16),), "item 0 of a sample is a Tensor"),
    ],
)
def test_what_does_not_fit_is_handed_over_as_usual_and_said_once(
    sample: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stamped, "__getitem__", lambda self, index: sample)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    feed = make(Stamped(), workers=2)
    (*_, last) = feed.train(0)
    assert len(list(feed.validation())) == 2
    logger.remove(sink)
    feed.close()
    (said,) = [line for line in lines if "handed over" in line]
    assert reason in said
    assert type(last.tensors) is type(sample)


def test_types_are_those_of_default_collate() -> None:
    sample = (np.zeros((2, 3), np.float32), torch.ones(2, dtype=torch.int16), 3, 0.5, True, np.int32(4), np.float64(1))
    fields = fields_of(sample)
    assert not isinstance(fields, str)
    holder = Slots(fields, 2, 0, 0)
    slot = holder.next(0)
    for index in range(2):
        slot.put(sample, index)
    for mine, usual in zip(holder.tensors(0, 0, 2), torch.utils.data.default_collate([sample, sample]), strict=True):
        assert mine.dtype == usual.dtype
        assert torch.equal(mine, usual)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_sample_of_another_shape_is_named_with_both(workers: int, on_error: str) -> None:
    feed = make(Odd(), workers, on_error=on_error)
    words = r"sample 21: item 0 is uint8 \[3, 7\], but the first sample's is uint8 \[3, 8\]: in data.py crop or pad"
    with pytest.raises(UserError, match=words):
        list(feed.train(0))
    feed.close()


@pytest.mark.parametrize("value", [2.5, np.float32(1), "cat", None, np.zeros(2)])
def test_nothing_is_bent_into_a_number(value: Any) -> None:
    slot = Slots([Field((), np.dtype(np.int64))], 2, 0, 0).next(0)
    with pytest.raises(UserError, match=r"sample 7: item 0 is .* but the first sample's is int64"):
        slot.put((value,), 7)


def test_what_a_sample_leaves_unfinished_is_made_in_its_place_after_others_are_drawn() -> None:
    dataset = Unfinished()
    feed = make(dataset, workers=0, batch_size=6, shuffle=False, on_error="skip")
    first = next(feed.train(0))
    images, labels = first.tensors
    replaced = labels.tolist()[3]
    assert labels.tolist() == [0, 1, 2, replaced, 4, 5]
    assert images[:, 299].tolist() == [label + 1000 for label in labels.tolist()]
    assert [bad.number for bad in first.bad] == [3]
    steps = [index for index, _ in dataset.made]
    assert steps[:6] == [-1] * 6  # all six are drawn before one is made
    places = [place for index, place in dataset.made if index >= 0]
    assert places == [images.data_ptr() + row * images[0].nbytes for row in range(6)]


class Careless(Stamped):
    """Gives out from [index] what is yet to be made; `words` make it unfit for slots."""

    def __init__(self, words: bool) -> None:
        super().__init__()
        self.words = words

    def __getitem__(self, index: int) -> Any:
        sample = Made(index + 100, []), index
        return (*sample, "text") if self.words else sample


@pytest.mark.parametrize("words", [False, True])
def test_what_is_yet_to_be_made_may_come_from_the_index_too(words: bool) -> None:
    (batch,) = make(Careless(words), workers=0, batch_size=4, shuffle=False).train(0, limit=1)
    assert batch.tensors[0][:, 299].tolist() == [1100, 1101, 1102, 1103]
    assert batch.tensors[1].tolist() == [0, 1, 2, 3]


def test_an_unfinished_item_of_another_size_is_named_with_both() -> None:
    feed = make(Unfinished(other=8), workers=0, on_error="skip")
    with pytest.raises(UserError, match=r"sample 8: item 0 is int64 \[200\], but the first sample's is int64 \[300\]"):
        list(feed.train(0))


def test_draws_of_unfinished_samples_come_from_seed_epoch_and_index() -> None:
    dataset = Unfinished()
    list(make(dataset, workers=0, batch_size=20, on_error="skip").train(0))
    for index in (0, 17, 59):
        seeding.seed_all(5, seeding.SAMPLE, 0, index)
        assert random.random() in dataset.drawn


def test_more_than_is_free_is_said_before_the_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [Field((1000,), np.dtype(np.uint8))]
    monkeypatch.setattr(host, "memory", lambda: (2_000_000, 2_050_000))
    words = r"6 batches .* take 0.1 MB, but 0.{0,3} MB of memory are free: lower data.workers, data.prefetch_factor"
    with pytest.raises(UserError, match=words):
        Slots(fields, 10, 2, 1)
    monkeypatch.setattr(slots, "_free_in", lambda folder: 40_000)
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(UserError, match=r"take 0.1 MB, but 0.0 MB in /dev/shm are free"):
        Slots(fields, 10, 2, 1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_without_anonymous_files_torchs_shared_memory_serves(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert all(whole(batch) for batch in make(Stamped(), start_method=method).train(0))


LEAVES = """
import os, signal, sys
{change}
from test_slots import Stamped, make
feed = make(Stamped(), workers=2)
batches = feed.train(0)
next(batches)
print(os.getpid(), *(worker.pid for worker in feed._stream._workers), flush=True)
{end}
"""


@pytest.mark.parametrize("change", ["", "del os.memfd_create"], ids=["memfd", "torch"])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)", "1 / 0"])
def test_nothing_is_left_in_shared_memory(change: str, end: str) -> None:
    code = LEAVES.format(change=change, end=end)
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == {"o": -signal.SIGKILL, "r": 3, "1": 1}[end[0]], done.stderr
    pids = done.stdout.split()
    assert len(pids) == 3
    assert not [name for name in os.listdir("/dev/shm") if set(name.split("_")) & set(pids)]


class Pins:
    """Plays the driver."""

    pinned: ClassVar[collections.Counter[int]] = collections.Counter()
    refuses = False

    def pin(self, address: int, size: int) -> None:
        if self.refuses:
            raise RuntimeError("out of memory")
        Pins.pinned[address] += 1

    def unpin(self, address: int) -> None:
        Pins.pinned[address] -= 1


def test_on_cuda_the_slots_are_pinned_once_and_no_thread_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "CudaPinning", Pins)
    monkeypatch.setattr(Pins, "pinned", collections.Counter())
    feed = make(Stamped(), workers=2, device="cuda")
    for _ in range(2):
        assert feed._loader(feed.train_samples, ValidationBatches(60, 4), persistent=False).pin_memory is False
    assert feed.train_samples.slots is not None
    assert Pins.pinned == {feed.train_samples.slots.memory.bytes.data_ptr(): 1}
    feed.close()
    gc.collect()
    assert not +Pins.pinned


def test_a_driver_that_refuses_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "refuses", True)
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    assert Slots([Field((), np.dtype(np.int64))], 2, 0, 0, Pins()).next(0).number == 0
    logger.remove(sink)
    assert "can't be pinned" in lines[0]
    assert "out of memory" in lines[0]


@pytest.mark.parametrize("value", [np.array(["a"]), np.zeros(2, ">i4"), torch.ones(2, requires_grad=True), None, 1j])
def test_what_has_no_field(value: Any) -> None:
    assert field_of(value) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_slots_and_the_ordinary_way_give_the_same(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = make(Draws(22), workers)
    mine = [seen(fast.train(epoch)) for epoch in range(2)]
    assert fast.train_samples.slots is not None
    fast.close()
    monkeypatch.setattr(feeding, "_probe", lambda dataset, seed: "a test")
    usual = make(Draws(22), workers)
    assert [seen(usual.train(epoch)) for epoch in range(2)] == mine
    assert usual.train_samples.slots is None
    usual.close()


def test_what_a_data_set_opens_on_first_use_is_not_open_when_workers_start() -> None:
    feed = make(Opening(), start_method="fork")
    assert all(whole(batch) for batch in feed.train(0))
    feed.close()
