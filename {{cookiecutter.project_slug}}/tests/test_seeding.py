"""Random draws repeat for a seed and a place, and differ between places."""

from __future__ import annotations

import random

import numpy as np
import torch

from fasttrain import seeding


def draw(*parts: int) -> tuple[float, float, float]:
    seeding.seed_all(*parts)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_three_generators_repeat_and_differ_by_place() -> None:
    assert draw(0, 1, 2) == draw(0, 1, 2)
    places = [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 3), (0, 1), (0, 1, 2, 0)]
    for one in range(3):
        assert len({draw(*place)[one] for place in places}) == len(places)


def test_neighbouring_seeds_are_not_alike() -> None:
    values = [seeding.mix(0, index) for index in range(1000)]
    ones = np.array([[value >> bit & 1 for bit in range(64)] for value in values]).mean(axis=0)
    assert len(set(values)) == 1000
    assert ((ones > 0.4) & (ones < 0.6)).all()


def test_permutation_is_one_and_the_same() -> None:
    assert sorted(seeding.permutation(50, 1, 2).tolist()) == list(range(50))
    assert (seeding.permutation(50, 1, 2) == seeding.permutation(50, 1, 2)).all()
    assert (seeding.permutation(50, 1, 2) != seeding.permutation(50, 1, 3)).any()


def test_pythons_generator_is_as_its_own_seed_sets_it() -> None:
    random.seed(seeding.mix(1, 2))
    random.gauss(0, 1)  # leaves a second number behind
    expected = random.Random(seeding.mix(1, 2))
    seeding.seed_all(1, 2)
    assert [random.gauss(0, 1), random.random()] == [expected.gauss(0, 1), expected.random()]
