"""``python -m fasttrain profile-data [--samples 100] [--json] [key=value ...]``: what making a sample costs, by step.

Names the slowest transform, and says what all cores together can make at most. Samples are drawn over the whole
training set and made as a loader worker makes them, in this process and on one core.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, Group
from rich.table import Table

from fasttrain import machine, seeding, settings
from fasttrain.errors import UserError
from fasttrain.slots import Slot, fields_of
from fasttrain.tools import project
from fasttrain.tools.sample_steps import REST, Timers
from fasttrain.worker import MapDataset, Stack

ROUNDS = 3
SMALLEST = 0.005  # share of a step that has a line of its own
FUNCTIONS = 8  # shown
ADVICE = {
    "read the file": "python -m fasttrain pack makes one file of all, data.warm=true keeps it in memory",
    "read the store": "data.warm=true keeps it in memory; --format jpeg makes it smaller",
    "read from the shard": "shards on this machine's own disk are read faster than behind a network",
    "decode": "python -m fasttrain pack decodes once and for all",
    "crop and resize": "python -m fasttrain pack --size a little above data.image_size leaves fewer pixels to resize",
}
OTHERWISE = "what a whole batch can share belongs in Prepare (data.py), on the device; what never changes can be packed"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain profile-data", description="What a sample costs, by step."
    )
    parser.add_argument("--samples", type=int, default=100, help="how many are measured (default: 100)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(arguments)
    if options.samples < 1:
        raise UserError(f"--samples {options.samples}: at least 1 is needed")
    data, config = project.module("data"), project.module("config")
    cfg, _ = settings.load(config.Config, project.HOME / "config.yaml", ["resume=null", *options.overrides])
    found = measure(data.build(cfg.data, cfg.seed).train, options.samples, cfg.seed, project.HOME)
    if options.json:
        print(json.dumps(found))
    else:
        Console(markup=False, highlight=False, emoji=False).print(shown(found))
    return 0


def measure(dataset: MapDataset, samples: int, seed: int, home: Path) -> dict[str, Any]:
    """Make the same samples again and again, plainly and with a timer around each step; of each the quickest counts.

    What disturbs the measurement only makes it longer. The first round, in which the disk is read, is kept apart.

    Returns:
        samples; ms a sample, first_ms the first time; steps, the costliest first, each with name, ms, share and calls a
        sample; functions, by their own time under cProfile; slowest, the first step's name; cores; images_per_second,
        what these can make at most.

    Raises:
        UserError: a sample that can't be read.
    """
    torch.set_num_threads(1)  # as in a loader worker
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    chosen = [int(index) for index in seeding.permutation(len(dataset), seed)[:samples]]
    make = _maker(dataset, chosen[0], seed)
    first = sum(_seconds(make, chosen)) / len(chosen) * 1e3
    ms = sum(map(min, zip(*(_seconds(make, chosen) for _ in range(ROUNDS)), strict=True))) / len(chosen) * 1e3
    timers = Timers()
    with timers.around(dataset, home):
        rounds = [_steps(timers.wrap(make, REST), timers, chosen) for _ in range(ROUNDS)]
    seconds: dict[str, float] = defaultdict(float)
    for tries in zip(*rounds, strict=True):  # of one sample
        for name in tries[0]:
            seconds[name] += min(each.get(name, 0.0) for each in tries)
    whole, made = sum(seconds.values()), ROUNDS * len(chosen)
    steps = [
        {"name": name, "ms": spent / whole * ms, "share": spent / whole, "calls": timers.calls[name] / made}
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    named = [step["name"] for step in steps if step["name"] != REST]
    cores = machine.cores()
    return {
        "samples": len(chosen),
        "ms": ms,
        "first_ms": first,
        "steps": steps,
        "slowest": named[0] if named else REST,
        "functions": _functions(make, chosen),
        "cores": cores,
        "images_per_second": cores / ms * 1e3,
    }


def shown(found: dict[str, Any]) -> Group:
    """The measurements for people."""
    steps = Table("step", "ms a sample", "share", "calls")
    small = [step for step in found["steps"] if step["share"] < SMALLEST]
    for step in found["steps"]:
        if step["share"] >= SMALLEST:
            steps.add_row(step["name"], f"{step['ms']:.3f}", f"{step['share']:.0%}", f"{step['calls']:g}")
    if small:
        total, share = sum(step["ms"] for step in small), sum(step["share"] for step in small)
        steps.add_row(f"{len(small)} smaller ones", f"{total:.3f}", f"{share:.0%}", "")
    steps.add_section()
    steps.add_row("a sample", f"{found['ms']:.3f}", "100%", "")
    functions = Table("function, by its own time under cProfile", "ms a sample", "calls")
    for each in found["functions"]:
        functions.add_row(each["name"], f"{each['ms']:.3f}", f"{each['calls']:g}")
    return Group(steps, functions, *words(found))


def words(found: dict[str, Any]) -> list[str]:
    """What to make of it."""
    name = found["slowest"]
    step = next(step for step in found["steps"] if step["name"] == name)
    rate, left = found["images_per_second"], max(found["ms"] - step["ms"], 1e-9)
    lines = [
        f"Slowest: {name}, {step['ms']:.3f} of {found['ms']:.3f} ms a sample ({step['share']:.0%}). "
        f"{found['cores']} cores can make {rate:,.0f} images/s at most; without it {rate * found['ms'] / left:,.0f}.",
        f"To change: {ADVICE.get(name, OTHERWISE)}.",
    ]
    if found["first_ms"] > 1.3 * found["ms"]:
        lines.append(
            f"The first time a sample took {found['first_ms']:.3f} ms: files not in the page cache yet, or what starts "
            "on first use."
        )
    return lines


def _maker(dataset: MapDataset, first: int, seed: int) -> Any:
    """A function that makes one sample by its index, seeded and into its place in a batch."""
    start = seeding.mix(seed, seeding.SAMPLE, 0)
    seeding.seed_all(first, start=start)
    fields = fields_of(dataset[first])
    slotted = not isinstance(fields, str)
    source: Any = dataset
    ahead = slotted and hasattr(dataset, "unfinished")
    places = [] if isinstance(fields, str) else [np.empty((1, *field.shape), field.dtype) for field in fields]

    def make(index: int) -> None:
        seeding.seed_all(index, start=start)
        into = Stack() if isinstance(fields, str) else Slot(0, fields, places)
        into.put(source.unfinished(index) if ahead else source[index], index)  # looked up here: it may be timed

    return make


def _seconds(make: Any, chosen: Sequence[int]) -> list[float]:
    """Of each sample."""
    times = [time.perf_counter()]
    for index in chosen:
        make(index)
        times.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(times)]


def _steps(make: Any, timers: Timers, chosen: Sequence[int]) -> list[dict[str, float]]:
    """Of each sample, the seconds of its steps."""
    timers.take()
    found = []
    for index in chosen:
        make(index)
        found.append(timers.take())
    return found


def _functions(make: Any, chosen: Sequence[int]) -> list[dict[str, Any]]:
    """The functions with the most time of their own, libraries' and C functions included."""
    few = chosen[: max(1, len(chosen) // 4)]
    profiler = cProfile.Profile()
    profiler.enable()
    for index in few:
        make(index)
    profiler.disable()
    rows: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = sorted(rows.items(), key=lambda item: -item[1][2])[:FUNCTIONS]
    return [{"name": _name(*where), "ms": row[2] / len(few) * 1e3, "calls": row[1] / len(few)} for where, row in own]


def _name(file: str, line: int, function: str) -> str:
    if file == "~":  # written in C
        return function.strip("<>").removeprefix("built-in method ")
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"
