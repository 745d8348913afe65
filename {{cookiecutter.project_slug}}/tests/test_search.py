"""The search behind tune, on machines that are played: with noise, with a plateau, with the best at an edge."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fasttrain.tools import search
from fasttrain.tools.search import Choice, Space, explore, grow, proof, prove

START = Choice(0, 4, 2)
SMALL = Space((0, 1, 2, 3), (2, 4, 8), (1, 2))
LARGE = Space((0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32), (2, 4, 8, 16), (1,))


def machine(cores: int, make: float, step: float, jitter: float = 0.0) -> Callable[[Choice], float]:
    """Batches a second: `make` seconds of a core for a batch, a step of `step` on a device; jitter wants prefetch."""

    def speed(choice: Choice) -> float:
        if choice.workers == 0:
            return 1 / (make + step)
        supply = min(choice.workers, cores) / make * (1 - 0.01 * max(0, choice.workers - cores))
        return min(supply / (1 + jitter / choice.prefetch), 1 / step)

    return speed


def noisy(speed: Callable[[Choice], float], part: float, seed: int) -> Callable[[Choice], float]:
    draw = random.Random(seed)
    return lambda choice: speed(choice) * (1 + draw.gauss(0, part))


def best_of(speed: Callable[[Choice], float], space: Space) -> float:
    return max(speed(Choice(w, p, t)) for w in space.workers for p in space.prefetch for t in space.threads)


MACHINES = {
    "plateau at two": (machine(2, 0.2, 0.1), SMALL),
    "the most workers": (machine(64, 3.0, 0.1), LARGE),
    "in the middle": (machine(64, 0.75, 0.1), LARGE),
    "one is enough": (machine(8, 0.05, 0.1), LARGE),
    "jitter": (machine(8, 0.7, 0.1, jitter=2.0), LARGE),
    "supply limits": (machine(4, 2.0, 0.1), LARGE),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("start", [START, Choice(2, 4, 1)])
def test_the_result_is_within_a_twentieth_of_an_exhaustive_sweep(name: str, start: Choice) -> None:
    speed, space = MACHINES[name]
    for seed in range(20):
        chosen, scores = explore(noisy(speed, 0.01, seed), start, space)
        assert speed(chosen) >= 0.95 * best_of(speed, space), (seed, chosen)
        assert sum(map(len, scores.found.values())) <= 25


def test_of_equal_choices_the_cheapest_with_the_fewest_changes_is_taken() -> None:
    speed, space = MACHINES["plateau at two"]
    assert explore(speed, START, space)[0] == Choice(2, 4, 2)
    assert explore(speed, Choice(2, 8, 2), space)[0] == Choice(2, 8, 2)  # nothing is faster: nothing changes


def test_threads_and_workers_share_the_cores() -> None:
    """Two cores: computing with both leaves none to the only worker; with one, two workers are one too many."""

    def speed(choice: Choice) -> float:
        return {(0, 1): 5.0, (0, 2): 6.0, (1, 1): 9.0, (1, 2): 7.0, (2, 1): 6.0, (2, 2): 7.5}.get(
            (choice.workers, choice.threads), 4.0
        )

    assert explore(speed, START, SMALL)[0][::2] == (1, 1)


def test_where_data_is_free_already_nothing_is_tried() -> None:
    chosen, scores = explore(machine(8, 0.05, 0.1), Choice(1, 4, 1), LARGE, free=10.0)
    assert (chosen, list(scores.found)) == (Choice(1, 4, 1), [Choice(1, 4, 1)])


def test_a_choice_that_fails_is_not_taken() -> None:
    speed, space = MACHINES["in the middle"]
    chosen, _ = explore(lambda choice: 0.0 if choice.workers > 4 else speed(choice), START, space)
    assert chosen.workers == 4


# ---- the proof


def test_a_change_that_does_nothing_is_rarely_accepted_and_a_real_one_is() -> None:
    def accepted(gain: float, noise: float, seed: int) -> bool:
        draw = random.Random(seed)
        runs = [lambda speed=speed: speed * (1 + draw.gauss(0, noise)) for speed in (100, 100 * (1 + gain))]
        return prove(*runs).accepted

    for noise in (0.01, 0.02, 0.05, 0.1):
        assert sum(accepted(0.0, noise, seed) for seed in range(4000)) <= 160  # 4 %
    assert sum(accepted(0.1, 0.02, seed) for seed in range(400)) >= 360
    assert sum(accepted(1.5, 0.1, seed) for seed in range(400)) >= 388


def test_runs_are_interleaved_and_two_more_pairs_settle_what_three_leave_open() -> None:
    order = []

    def one(name: str, speeds: list[float]) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return speeds.pop(0)

        return measure

    found = prove(one("a", [100.0, 100.0, 100.0]), one("b", [150.0, 151.0, 149.0]))
    assert ("".join(order), found.accepted, found.pairs) == ("abbaab", True, 3)
    order.clear()
    found = prove(one("a", [100.0] * 5), one("b", [150.0, 151.0, 95.0, 152.0, 149.0]))  # a slow moment in one run
    assert ("".join(order), found.accepted, found.pairs) == ("abbaabbaab", True, 5)
    assert prove(one("a", [100.0] * 3), one("b", [99.0, 98.0, 100.0])).pairs == 3


def test_a_gain_below_two_percent_is_none() -> None:
    assert not proof([100.0] * 3, [101.0] * 3).accepted
    assert proof([100.0] * 3, [103.0] * 3).accepted


# ---- the batch size


@pytest.mark.parametrize(
    ("memory", "start", "size"),
    [
        (1000, 32, 512),  # grows until memory is short
        (100, 64, 64),
        (40, 64, 32),  # halves
        (0, 64, 0),
    ],
)
def test_the_batch_grows_until_memory_is_short_and_halves_where_it_is(memory: int, start: int, size: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> float | None:
        tried.append(batch)
        return batch**0.5 if batch <= memory else None

    assert grow(fits, start)[0] == size
    assert len(tried) == len(set(tried))


def test_a_batch_that_brings_nothing_more_ends_the_growth() -> None:
    found, speeds = grow(lambda batch: min(batch, 128) * 1.0, 32)
    assert (found, list(speeds)) == (128, [32, 64, 128, 256])
    assert grow(lambda batch: batch * 1.0, 32, most=100)[0] == 64


def test_every_limit_is_named_here() -> None:
    """The words of the proof state these numbers; change both."""
    assert (search.LEAST, search.PAIRS, search.MOST_PAIRS) == (0.02, 3, 5)
