"""What the training gets does not depend on workers or processes; every draw is seeded by its place."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fasttrain.feed as feeding
from fasttrain import loader
from fasttrain.errors import SettingsError, UserError
from fasttrain.feed import Feed
from fasttrain.transfer import Batch, ahead


class Draws(Dataset[Any]):
    """Each sample is its index and one draw from each of the three global generators."""

    def __init__(self, size: int, broken: int | None = None) -> None:
        self.size, self.broken = size, broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == self.broken:
            raise UserError(f"photo{index}.jpg: cut short")
        return np.full((2, 2), index % 256, np.uint8), index, random.random(), np.random.rand(), torch.rand(())


def data(**changes: Any) -> SimpleNamespace:
    values = {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": False,
        "on_error": "fail",
        "prefetch_factor": 2,
        "persistent_workers": True,
        "pin_memory": None,
        "start_method": None,
    }
    return SimpleNamespace(**{**values, **changes})


def make(size: int = 22, workers: int = 0, rank: int = 0, world: int = 1, **changes: Any) -> Feed:
    train = Draws(size, changes.pop("broken", None))
    return Feed(
        train,
        Draws(7),
        data(**changes),
        workers=workers,
        epochs=3,
        seed=5,
        rank=rank,
        world=world,
        device=torch.device("cpu"),
    )


def seen(batches: Iterator[Batch]) -> list[tuple[float, ...]]:
    """Every sample with its draws, in the order it came."""
    return [
        tuple(float(column[i]) for column in batch.tensors[1:]) for batch in batches for i in range(len(batch.indices))
    ]


def test_workers_that_stay_get_more_than_one_look_to_begin_a_validation_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LOOK", 0.2)
    feed = make(workers=1, persistent_workers=True)
    try:
        first = seen(feed.validation())
        worker = feed._val_loader._iterator._workers[0].pid  # type: ignore[union-attr]
        os.kill(worker, signal.SIGSTOP)
        later = threading.Timer(1.0, os.kill, (worker, signal.SIGCONT))
        later.start()
        assert seen(feed.validation()) == first
        later.join()
    finally:
        feed.close()


def three_epochs(feed: Feed) -> list[list[tuple[float, ...]]]:
    epochs = [seen(feed.train(epoch)) for epoch in range(3)]
    feed.close()
    return epochs


@pytest.fixture(scope="module")
def plain() -> list[list[tuple[float, ...]]]:
    return three_epochs(make())


@pytest.mark.parametrize(
    ("workers", "changes"),
    [
        (1, {}),
        (3, {}),
        (3, {"persistent_workers": False}),
        (2, {"start_method": "spawn"}),
        (2, {"start_method": "forkserver"}),
    ],
)
def test_order_and_augmentation_do_not_depend_on_the_workers(
    plain: list[list[tuple[float, ...]]], workers: int, changes: dict[str, Any]
) -> None:
    assert three_epochs(make(workers=workers, **changes)) == plain


def test_nor_on_the_number_of_processes(plain: list[list[tuple[float, ...]]]) -> None:
    halves = [three_epochs(make(rank=rank, world=2, batch_size=2)) for rank in range(2)]
    for epoch in range(3):
        assert sorted(halves[0][epoch] + halves[1][epoch]) == sorted(plain[epoch])


def test_draws_differ_between_samples_and_epochs(plain: list[list[tuple[float, ...]]]) -> None:
    for kind in (1, 2, 3):
        draws = [sample[kind] for epoch in plain for sample in epoch]
        assert len(set(draws)) == len(draws) == 66


def test_starting_in_the_middle_gives_exactly_the_rest(plain: list[list[tuple[float, ...]]]) -> None:
    feed = make(workers=2)
    assert seen(feed.train(1, start=8)) == plain[1][8:]
    assert seen(feed.train(2)) == plain[2]
    feed.close()


def test_a_limit_stops_early_and_the_next_call_goes_on(plain: list[list[tuple[float, ...]]]) -> None:
    feed = make(workers=2)
    batches = list(feed.train(0, limit=2))
    assert [b.end for b in batches] == [4, 8]
    assert seen(iter(batches)) + seen(feed.train(0, start=8)) == plain[0]
    feed.close()


def test_the_workers_go_on_into_the_next_epoch() -> None:
    feed = make(workers=1)
    list(feed.train(0))
    stream = feed._stream
    next(feed.train(1))
    assert feed._stream is stream, "the workers were started anew"
    feed.close()


def test_validation_is_the_same_each_time_and_whole() -> None:
    feed = make(workers=2)
    first = seen(feed.validation())
    assert first == seen(feed.validation())
    assert sorted(sample[0] for sample in first) == list(range(7))
    feed.close()


def test_draws_of_the_training_process_depend_on_the_place_only() -> None:
    values = {}
    for workers in (0, 1):
        feed = make(workers=workers)
        values[workers] = [float(torch.rand(())) for _ in feed.train(0)]
        feed.close()
    assert values[0] == values[1]
    assert len(set(values[0])) == 6
    other = make(rank=1, world=2)
    assert float(torch.rand(())) not in values[0]
    assert [float(torch.rand(())) for _ in other.train(0)] != values[0][:3]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_fails_ends_in_one_line(workers: int) -> None:
    feed = make(workers=workers, broken=9)
    with pytest.raises(UserError, match=r"^photo9.jpg: cut short; data.on_error=skip goes on without such samples$"):
        list(feed.train(0))
    feed.close()


def test_draws_on_apples_devices_belong_to_their_batch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    monkeypatch.setattr(feeding, "to_device", lambda batches, *rest: batches)
    feed = make(workers=0)
    list(feed.train(0))
    assert seeds == [], "on a CPU it is left alone"
    feed.device = torch.device("mps")
    list(feed.train(1))
    first = seeds.copy()
    list(feed.train(1))
    assert len(set(first)) == 6
    assert seeds[6:] == first


def test_the_loader_is_described_once_with_how_its_data_set_is_stored() -> None:
    for stored in ("jpeg", None):
        feed = make()
        told: list[tuple[str, str | None]] = []
        if stored:
            vars(feed.train_samples.dataset)["stored"] = stored
        feed.tell(lambda name, told=told, **fields: told.append((name, fields["stored"])))
        list(feed.train(0))
        assert told == [("loader", stored)]


def test_batches_tell_who_made_them_and_how_long_it_took() -> None:
    feed = make(workers=2)
    batches = list(feed.train(0))
    feed.close()
    assert {b.worker for b in batches} == {0, 1}
    assert all(b.made > 0 and b.ready is not None and b.ready >= 0 for b in batches)
    assert [b.worker for b in make().train(0)] == [None] * 6


@pytest.mark.parametrize(
    ("size", "world", "changes"),
    [(3, 1, {"batch_size": 8, "drop_last": True}), (5, 4, {"batch_size": 2, "drop_last": True})],
)
def test_too_little_data_is_said_at_the_start_with_both_numbers(size: int, world: int, changes: dict[str, Any]) -> None:
    with pytest.raises(
        SettingsError, match=rf"data.batch_size={changes.get('batch_size', 4)}: .*{size} training samples"
    ):
        make(size, world=world, **changes)


@pytest.mark.parametrize(("size", "world"), [(3, 1), (1, 2), (5, 4)])
def test_little_data_trains_on_every_rank_equally(size: int, world: int) -> None:
    counts = {len(list(make(size, rank=rank, world=world, batch_size=8).train(0))) for rank in range(world)}
    assert counts == {1}


def test_tensors_are_batched_as_uint8_arrays_and_numbers() -> None:
    first = next(iter(make().train(0)))
    image, index, *_ = first.tensors
    assert image.shape == (4, 2, 2)
    assert image.dtype == torch.uint8
    assert index.dtype == torch.int64
    assert first.size == 4


def test_breaking_out_of_the_loop_loses_no_batch_though_copies_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Streams:
        def copy(self, tensors: Any) -> tuple[Any, float, float]:
            return tensors, 0.0, 0.0

        def hand_over(self, tensors: Any, copied: float) -> None: ...
        def wait(self, copied: float) -> None: ...

    monkeypatch.setattr(feeding, "to_device", lambda batches, *where: ahead(batches, Streams()))
    feed = make()
    first = next(feed.train(0))
    rest = list(feed.train(0, first.end))
    assert sorted(i for b in (first, *rest) for i in b.indices) == list(range(22))


@pytest.mark.parametrize("workers", [0, 1])
def test_no_profiler_span_is_paid_for_each_batch(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be a third of the wait for a batch that lies ready."""
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: pytest.fail("a span was opened"))
    feed = make(workers=workers)
    assert sum(batch.size for batch in feed.train(0)) > 0
    assert sum(batch.size for batch in feed.validation()) > 0
    feed.close()
