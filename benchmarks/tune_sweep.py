"""Is what `tune` finds the best there is? An exhaustive sweep in real runs beside it.

    python benchmarks/tune_sweep.py [--project FOLDER] [--rounds 3] [--seconds 4] [key=value ...]

Every pair of workers and threads, and every prefetch with the best of these, is measured by real runs of train.py,
`rounds` times, interleaved. The last line is the median speed of what tune chose over that of the best. Claim: at least
0.95, in under 3 minutes for tune itself on 2 cores. With other work on the machine the figure says little.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=ROOT / "{{cookiecutter.project_slug}}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    sys.path.insert(0, str(options.project.resolve()))
    from fasttrain.tools import tune
    from fasttrain.tools.trials import Runs

    with tune.scratch("sweep") as folder:
        (folder / "tune").mkdir()
        began = time.monotonic()
        outcome = tune.tune(options.overrides, folder / "tune", 1, options.seconds, False, print)
        spent = time.monotonic() - began
        start, space = space_of(folder / "tune/sweep/told.jsonl")
        own = dict(zip(tune.KEYS, start, strict=True))
        chosen = {**own, **outcome.changes}
        runs = Runs(options.overrides, folder, options.seconds)
        grid = [{**own, tune.KEYS[0]: w, tune.KEYS[2]: t} for w in space[0] for t in space[2]]
        speeds = measured(runs, [*grid, chosen], options.rounds)
        best = max(grid, key=lambda each: median(speeds[key_of(each)]))
        others = [{**best, tune.KEYS[1]: prefetch} for prefetch in space[1]]
        for key, found in measured(runs, [*others, chosen], options.rounds).items():
            speeds.setdefault(key, []).extend(found)
    ranked = sorted(speeds.items(), key=lambda each: -median(each[1]))
    for key, found in ranked:
        shown = ", ".join(f"{name}={value}" for name, value in key)
        print(f"{median(found):9,.0f} img/s  ({min(found):,.0f} to {max(found):,.0f})  {shown}")
    ratio = median(speeds[key_of(chosen)]) / median(ranked[0][1])
    print(f"tune took {spent:.0f} s; its choice reaches {ratio:.3f} of the best of {len(speeds)}")


def measured(runs: Any, settings: list[dict[str, Any]], rounds: int) -> dict[tuple[Any, ...], list[float]]:
    """Images a second of each, measured in turn, round by round."""
    speeds: dict[tuple[Any, ...], list[float]] = {}
    each = {key_of(one): one for one in settings}
    for _ in range(rounds):
        for key, one in each.items():
            arguments = [f"{name}={value}" for name, value in one.items()]
            speeds.setdefault(key, []).append(runs.measure(arguments)[0].images_per_second)
    return speeds


def key_of(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(settings.items())


def space_of(file: Path) -> tuple[list[int], list[list[int]]]:
    """The settings at the start and the values tried, as the sweep told them."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    headroom = next(row for row in rows if row["kind"] == "headroom")
    return headroom["start"], headroom["space"]


if __name__ == "__main__":
    main()
