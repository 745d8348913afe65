"""The search behind ``tune``: pure logic over a function that measures. No clock, no process, no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

LEAST = 0.02  # a gain below this isn't worth a change, however sure
CLOSE = 0.02  # scores this near to the best count as equal: then the cheaper one is taken
FREE = 0.98  # of the speed with data for free: from here on no loader setting can help
ALL = 5  # a ladder of so few values is measured whole
GRID = 10  # so many pairs of workers and threads are measured all: cores are shared, one depends on the other
PLAYOFF = 3  # choices that are measured again, interleaved
ROUNDS = 2  # times
PAIRS, MOST_PAIRS = 3, 5  # real runs before and after; the larger number where three leave it open


class Choice(NamedTuple):
    """The settings that ``tune`` searches: they change the speed, and nothing of what is learnt."""

    workers: int
    prefetch: int
    threads: int

    def changes(self, start: Choice) -> int:
        """Settings that differ."""
        return sum(mine != its for mine, its in zip(self, start, strict=True))

    def cost(self) -> tuple[int, int, int]:
        """What it takes from the machine: of equal ones the cheapest wins."""
        return self.workers * (self.prefetch + 2), self.workers, self.threads


@dataclass(frozen=True)
class Space:
    """The values to try, ascending; one value alone: that setting is not searched."""

    workers: tuple[int, ...]
    prefetch: tuple[int, ...]
    threads: tuple[int, ...]


Measure = Callable[[Choice], float]  # images a second; 0 for a choice that fails


class Scores:
    """What was measured so far."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.found: dict[Choice, list[float]] = {}

    def again(self, choice: Choice) -> None:
        self.found.setdefault(choice, []).append(self._measure(choice))

    def of(self, choice: Choice) -> float:
        """The median of what was measured; measures if nothing was."""
        if choice not in self.found:
            self.again(choice)
        return median(self.found[choice])

    def best(self, start: Choice) -> Choice:
        """Of those that are as good as the best the one with the fewest changes from `start`, then the cheapest."""
        top = max(self.of(choice) for choice in self.found)
        equal = (choice for choice in self.found if self.of(choice) >= top * (1 - CLOSE))
        return min(equal, key=lambda choice: (choice.changes(start), choice.cost()))


def explore(measure: Measure, start: Choice, space: Space, free: float | None = None) -> tuple[Choice, Scores]:
    """Search one setting after another, then measure the best few again.

    Args:
        start: the settings now; they are what is returned unless others are better.
        free: images a second with data for free, if no setting here can change that.

    Returns:
        The choice to prove by real runs, and all scores.
    """
    scores = Scores(measure)
    if free is not None and scores.of(start) >= FREE * free:
        return start, scores
    if len(space.workers) * len(space.threads) <= GRID:
        grid = [start._replace(workers=w, threads=t) for w in space.workers for t in space.threads]
        best = _better(grid, start, scores)
    else:
        best = _by_turns(start, space, scores)
    if best.workers:
        best = _along("prefetch", space.prefetch, best, scores)
    _play_off(scores, start)
    return scores.best(start), scores


def _by_turns(start: Choice, space: Space, scores: Scores) -> Choice:
    """Workers, then threads, then workers near the best again."""
    best = _along("workers", space.workers, start, scores)
    if len(space.threads) > 1:
        faster = _along("threads", space.threads, best, scores)
        if faster.threads != best.threads:  # cores that computing leaves are the workers', and the other way round
            faster = _along("workers", _neighbours(space.workers, faster.workers), faster, scores)
        best = faster
    return best


def _along(name: str, values: Sequence[int], best: Choice, scores: Scores) -> Choice:
    """The best value of one setting: of all where they are few, else by climbing to both sides."""
    ladder = sorted({*values, getattr(best, name)})
    if len(ladder) <= ALL:
        return _better([best._replace(**{name: value}) for value in ladder], best, scores)
    here = ladder.index(getattr(best, name))
    up, down = ladder[here + 1 :], ladder[:here][::-1]
    for side in (up, down):
        found = _climb([best._replace(**{name: value}) for value in side], best, scores)
        if found != best:
            return found
    return best


def _climb(choices: Sequence[Choice], best: Choice, scores: Scores) -> Choice:
    """Go on as long as it gets faster; one step that doesn't may be noise, or a flat spot."""
    missed = 0
    for choice in choices:
        if scores.of(choice) > scores.of(best) * (1 + LEAST):
            best, missed = choice, 0
        else:
            missed += 1
        if missed == 2:
            break
    return best


def _better(choices: Sequence[Choice], best: Choice, scores: Scores) -> Choice:
    top = max(choices, key=scores.of)
    if scores.of(best) >= scores.of(top) * (1 - CLOSE):
        return best
    return min((c for c in choices if scores.of(c) >= scores.of(top) * (1 - CLOSE)), key=Choice.cost)


def _neighbours(values: Sequence[int], value: int) -> list[int]:
    ladder = sorted({*values, value})
    here = ladder.index(value)
    return ladder[max(0, here - 1) : here + 2]


def _play_off(scores: Scores, start: Choice) -> None:
    first = sorted(scores.found, key=scores.of, reverse=True)[:PLAYOFF]
    for _ in range(ROUNDS if len(scores.found) > 1 else 0):
        for choice in dict.fromkeys([*first, start]):
            scores.again(choice)


# ---------------------------------------------------------------- the proof


@dataclass(frozen=True)
class Proof:
    """What pairs of real runs say of a change. gain and noise are parts of 1: 0.5 is half as fast again."""

    gain: float
    noise: float
    pairs: int

    @property
    def accepted(self) -> bool:
        return self.gain > max(LEAST, self.noise)

    @property
    def open(self) -> bool:
        """Whether more pairs could still show a gain."""
        return not self.accepted and self.pairs < MOST_PAIRS and self.gain > 0 and self.gain + self.noise > LEAST

    def __str__(self) -> str:
        return f"{self.gain:+.1%} against a noise of {self.noise:.1%}, {self.pairs} pairs of runs"


def proof(before: Sequence[float], after: Sequence[float]) -> Proof:
    """Judge pairs of speeds, each measured one right after the other.

    The noise is 1.5 times the spread of the gains of three or four pairs, or twice that of the middle ones of five.
    Where runs vary by 1, 2, 5 or 10 %, a change that does nothing is then taken for a gain in 0, 2, 3 or 4 % of cases;
    one that brings 10 % passes in 93 % of cases if they vary by 2 %.
    """
    gains = sorted(b / a - 1 for a, b in zip(before, after, strict=True))
    spread = gains[-1] - gains[0] if len(gains) < MOST_PAIRS else gains[-2] - gains[1]
    return Proof(median(gains), spread * (1.5 if len(gains) < MOST_PAIRS else 2.0), len(gains))


def prove(before: Callable[[], float], after: Callable[[], float]) -> Proof:
    """Measure real runs in pairs, turn and turn about, until it is decided."""
    old: list[float] = []
    new: list[float] = []
    while True:
        for measure, into in ((before, old), (after, new)) if len(old) % 2 == 0 else ((after, new), (before, old)):
            into.append(measure())
        if len(old) >= PAIRS and not (found := proof(old, new)).open:
            return found


# ---------------------------------------------------------------- the batch size


def grow(fits: Callable[[int], float | None], start: int, most: int | None = None) -> tuple[int, dict[int, float]]:
    """A larger batch as long as it fits and brings something; a smaller one where not even `start` fits.

    Args:
        fits: images a second of a step with this batch size; None where memory is short.
        most: the largest that may be tried.

    Returns:
        The size, 0 if none fits, and the speeds of those that do.
    """
    size = start
    while size and (speed := fits(size)) is None:
        size //= 2
    if not size or speed is None:
        return 0, {}
    speeds = {size: speed}
    larger = size * 2
    while size == start and (most is None or larger <= most) and (speed := fits(larger)) is not None:
        speeds[larger] = speed
        if speed <= speeds[larger // 2] * (1 + LEAST):
            break  # it fits, and brings nothing
        larger *= 2
    top = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= top * (1 - CLOSE)), speeds
