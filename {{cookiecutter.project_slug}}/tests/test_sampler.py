"""The order of the samples: DistributedSampler's contract, one global order, positions."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch.utils.data import DistributedSampler

from fasttrain.sampler import GlobalOrderSampler, TrainingBatches, ValidationBatches


def ranks(size: int, world: int, **options: object) -> list[list[int]]:
    return [list(GlobalOrderSampler(size, world, rank, **options)) for rank in range(world)]  # type: ignore[arg-type]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 3), (7, 2), (3, 4), (1, 2), (12, 4)])
def test_lengths_are_those_of_distributed_sampler(size: int, world: int, drop_last: bool) -> None:
    for rank in range(world):
        theirs: Any = DistributedSampler(cast(Any, range(size)), world, rank, shuffle=False, drop_last=drop_last)
        ours = GlobalOrderSampler(size, world, rank, shuffle=False, drop_last=drop_last)
        assert len(list(ours)) == len(ours) == (size // world if drop_last else len(theirs))
        if not drop_last:
            assert list(ours) == list(theirs)


@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 3), (7, 2), (3, 4), (1, 2)])
def test_every_sample_comes_once_over_all_ranks_but_for_the_filling_up(size: int, world: int) -> None:
    drawn = sorted(index for rank in ranks(size, world) for index in rank)
    extra = -size % world
    assert len(drawn) == size + extra
    assert set(drawn) == set(range(size))


def test_dropping_gives_equal_ranks_without_repeats() -> None:
    drawn = [index for rank in ranks(10, 3, drop_last=True) for index in rank]
    assert len(drawn) == len(set(drawn)) == 9


def test_order_changes_with_epoch_and_seed_and_repeats() -> None:
    sampler = GlobalOrderSampler(100, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert first == list(sampler) != second
    assert first != list(GlobalOrderSampler(100, seed=2))


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        GlobalOrderSampler(10, 2, 2)


def batches(size: int, world: int, batch: int, start: int = 0, epochs: int = 1, **options: object) -> list[set[int]]:
    """The k-th global batch of all ranks."""
    per_rank = [
        list(TrainingBatches(GlobalOrderSampler(size, world, r, **options), batch, 0, start, epochs))  # type: ignore[arg-type]
        for r in range(world)
    ]
    assert len({len(keys) for keys in per_rank}) == 1, "all ranks take the same number of batches"
    return [set().union(*(key.indices for key in keys)) for keys in zip(*per_rank, strict=True)]


def test_the_same_global_batch_holds_the_same_samples_whatever_the_number_of_processes() -> None:
    assert batches(96, 1, 24) == batches(96, 2, 12) == batches(96, 3, 8) == batches(96, 4, 6)


@pytest.mark.parametrize("drop_last", [False, True])
def test_starting_in_the_middle_gives_the_rest_also_with_other_processes(drop_last: bool) -> None:
    whole = batches(50, 2, 6, drop_last=drop_last)
    assert batches(50, 2, 6, start=24, drop_last=drop_last) == whole[2:]
    assert batches(50, 1, 12, start=24, drop_last=drop_last) == whole[2:]
    assert batches(50, 4, 3, start=24, drop_last=drop_last)[:2] == whole[2:4]


def test_batches_say_where_they_stand() -> None:
    keys = list(TrainingBatches(GlobalOrderSampler(10, 2, 0), 2, 3, 4, 5))
    assert [(k.epoch, k.number, k.last, k.end) for k in keys] == [
        (3, 1, 2, 8),
        (3, 2, 2, 10),
        (4, 0, 2, 4),
        (4, 1, 2, 8),
        (4, 2, 2, 10),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_counts_every_sample_once(world: int) -> None:
    drawn = [i for rank in range(world) for key in ValidationBatches(7, 2, world, rank) for i in key.indices]
    assert sorted(drawn) == list(range(7))
