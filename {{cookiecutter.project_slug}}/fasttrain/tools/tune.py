"""``python -m fasttrain tune [--dry-run] [--batch-size] [key=value ...]``: the fastest loader settings, by measurement.

First what there is to gain: the same batch again and again. Then workers, prefetch and threads are tried in one
process, and the best is proven against the settings now by real runs, turn and turn about. What gains more than the
noise is written into config.yaml, where all else stays as it is. Under torchrun with that many processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain import history, settings
from fasttrain.errors import UserError, as_typed
from fasttrain.stop import Stopped
from fasttrain.tools import edit_settings, project, search
from fasttrain.tools.search import Choice, Proof
from fasttrain.tools.trials import POLL, Measured, Runs, command, reason, started

KEYS = ("data.workers", "data.prefetch_factor", "run.threads")  # in the order of Choice's fields
WORDS = ("workers", "prefetch", "threads")
SECONDS = 4.0  # of a real run; those of the sweep take half as long
Say = Callable[[str], None]


@dataclass
class Outcome:
    """What came of it. before and after: real runs."""

    before: list[Measured]
    after: list[Measured] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)  # accepted; empty: the settings stay
    values: dict[str, Any] = field(default_factory=dict)  # those of `changes` before
    proof: Proof | None = None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain tune", description="The fastest loader settings, by measurement."
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would change in config.yaml, write nothing")
    parser.add_argument(
        "--batch-size", action="store_true", help="search data.batch_size too: it changes what is learnt"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each real run (default: {SECONDS:g})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change for all runs")
    options = parser.parse_intermixed_args(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0  # rank 0 drives, and starts as many processes itself
    signal.signal(signal.SIGTERM, terminate)
    file = project.HOME / "config.yaml"
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    began = time.monotonic()
    try:
        with scratch("tune") as folder:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            outcome = tune(options.overrides, folder, processes, options.seconds, options.batch_size, console.print)
    except (KeyboardInterrupt, Stopped):
        console.print(f"stopped; {file.name} is as it was")
        raise
    console.print(table(outcome))
    _conclude(outcome, file, options.dry_run, console.print)
    console.print(f"took {time.monotonic() - began:.0f} s")
    return 0


def tune(overrides: Sequence[str], folder: Path, processes: int, seconds: float, batch_size: bool, say: Say) -> Outcome:
    """Measure and search.

    Args:
        overrides: settings of every run, as on the command line.
        folder: for what the runs leave.
        processes: training processes of each run.
        seconds: to measure a real run.
        batch_size: search the batch size first.

    Raises:
        UserError: a run with the settings now fails, in its own words.
    """
    cfg, _ = settings.load(project.module("config").Config, project.HOME / "config.yaml", overrides)
    say(f"tune      {cfg.model.name}, batch {cfg.data.batch_size}, {processes} process{'es' * (processes > 1)}")
    values = {"data.batch_size": cfg.data.batch_size}
    changes: dict[str, Any] = {}
    if batch_size:
        changes |= _batch_size(overrides, folder, processes, cfg.data.batch_size, say)
    start, chosen = _sweep([*overrides, *arguments_of(changes)], folder, processes, seconds / 2, say)
    values |= dict(zip(KEYS, (cfg.data.workers, cfg.data.prefetch_factor, cfg.run.threads), strict=True))
    changes |= {key: new for key, old, new in zip(KEYS, start, chosen, strict=True) if old != new}
    outcome = Outcome([], values={key: values[key] for key in changes})
    runs = Runs(overrides, folder, seconds, processes)
    if not changes:
        outcome.before.append(runs.measure()[0])
        say("result    nothing that was tried is faster: the settings stay")
        return outcome
    say("proving   " + ", ".join(_arrow(key, values[key], new) for key, new in changes.items()) + ", by real runs")
    outcome.proof = _prove(runs, arguments_of(changes), outcome, say)
    if outcome.proof.accepted:
        outcome.changes = changes
    say(f"result    {outcome.proof}: {'accepted' if outcome.changes else 'not enough, the settings stay'}")
    return outcome


def table(outcome: Outcome) -> Table:
    """Before and after."""
    shown = Table("", "before", *(["after"] if outcome.after else []))
    new = outcome.changes or {}
    for key, old in outcome.values.items():
        shown.add_row(key, as_typed(old), *([as_typed(new.get(key, "(tried)"))] if outcome.after else []))
    runs = [middle(each) for each in (outcome.before, outcome.after) if each]
    add_measures(shown, runs)
    return shown


def add_measures(shown: Table, runs: Sequence[Measured]) -> None:
    """The rows of the report that this product begins with, one column a run."""
    first = runs[0].images_per_second
    shown.add_row("ms a step", *(f"{each.step * 1e3:.1f}" for each in runs))
    shown.add_row("waiting for data", *(f"{each.wait:.1%}" for each in runs))
    shown.add_row("device busy", *(f"{each.busy:.1%}" for each in runs))
    shown.add_row("img/s", *(f"{each.images_per_second:,.0f}" for each in runs))
    if len(runs) > 1:
        shown.add_row("speed", *(f"{each.images_per_second / first:.2f} x" for each in runs))


def middle(runs: Sequence[Measured]) -> Measured:
    """Field by field the median."""
    values = {each.name: median(getattr(run, each.name) for run in runs) for each in fields(Measured)}
    return Measured(**values)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A folder beside the run directories, for runs that nothing is kept of."""
    runs = project.HOME / "runs"
    was_there = runs.exists()
    runs.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=runs))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # another run has begun in it
                runs.rmdir()


def _sweep(overrides: Sequence[str], folder: Path, processes: int, seconds: float, say: Say) -> tuple[Choice, Choice]:
    """Run sweep.py: the settings now, and those to prove."""
    start = chosen = None
    for row in _rows(overrides, folder / "sweep", processes, {"seconds": seconds, "batch_size": False}):
        if row["kind"] == "headroom":
            start = Choice(*row["start"])
            say(f"headroom  with data for free {row['free']:,.0f} img/s on {row['device']}")
            tried = (
                f"{word} {' '.join(map(str, v))}" for word, v in zip(WORDS, row["space"], strict=True) if len(v) > 1
            )
            say("trying    " + ", ".join(tried))
        elif row["kind"] == "speed":
            speed = f"{row['speed']:9,.0f} img/s" if row["speed"] else "  does not work here"
            shown = (f"{w} {v:<3}" for w, v in zip(WORDS, row["choice"], strict=True) if w != "threads" or v)
            say("          " + " ".join(shown) + speed)
        elif row["kind"] == "chosen":
            chosen = Choice(*row["choice"])
    if start is None or chosen is None:
        raise UserError("the search ended without a result")
    return start, chosen


def _batch_size(overrides: Sequence[str], folder: Path, processes: int, now: int, say: Say) -> dict[str, Any]:
    """Try larger batches in one process."""
    plan = {"seconds": 1.0, "batch_size": True, "processes": processes}
    for row in _rows(overrides, folder / "sizes", 1, plan):
        if row["kind"] == "batch_size":
            for size, speed in row["speeds"].items():
                say(f"          batch {size:<5} {speed:9,.0f} img/s, the step alone")
            if not row["size"]:
                raise UserError("not even one sample fits in memory: a smaller model or data.image_size is needed")
            if row["size"] != now:
                say("          another batch size changes what is learnt: adapt optimizer.lr, compare the metrics")
                return {"data.batch_size": row["size"]}
    return {}


def _rows(overrides: Sequence[str], folder: Path, processes: int, plan: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What sweep.py tells, while it runs."""
    folder.mkdir()
    out, file, output = folder / "told.jsonl", folder / "plan.json", folder / "output.txt"
    own = ("resume=null", f"run.dir={folder / 'run'}")
    file.write_text(json.dumps({**plan, "out": str(out), "overrides": [*overrides, *own]}))
    with started(command(["-m", "fasttrain.tools.sweep", str(file)], processes), output) as process:
        rows = history.Tail(out)
        while process.poll() is None:
            yield from rows()
            time.sleep(POLL)
        yield from rows()
    if process.returncode:
        raise UserError(reason(output))


def _prove(runs: Runs, changes: Sequence[str], outcome: Outcome, say: Say) -> Proof:
    def one(name: str, settings: Sequence[str], into: list[Measured]) -> Callable[[], float]:
        def measure() -> float:
            into.append(found := runs.measure(settings)[0])
            times = f"{found.step * 1e3:7.1f} ms a step, waiting {found.wait:6.1%}, busy {found.busy:6.1%}"
            say(f"          {name:<7}{times} {found.images_per_second:9,.0f} img/s")
            return found.images_per_second

        return measure

    return search.prove(one("before", (), outcome.before), one("after", changes, outcome.after))


def _conclude(outcome: Outcome, file: Path, dry_run: bool, say: Say) -> None:
    """Write the accepted changes, or show them."""
    if not outcome.changes:
        say(f"{file.name} is as it was")
        return
    old = edit_settings.read(file)
    new = edit_settings.changed(old, outcome.changes)
    if dry_run:
        say(edit_settings.difference(old, new, file.name))
        say(f"--dry-run: {file.name} is as it was")
        return
    edit_settings.write(file, new)
    say(f"{file.name}: " + ", ".join(_arrow(k, outcome.values[k], v) for k, v in outcome.changes.items()))


def arguments_of(changes: Mapping[str, Any]) -> list[str]:
    """As on the command line."""
    return [f"{key}={value}" for key, value in changes.items()]


def _arrow(key: str, old: Any, new: Any) -> str:
    return f"{key}: {as_typed(old)} -> {as_typed(new)}"


def terminate(number: int, frame: FrameType | None) -> None:
    """For SIGTERM: end as with Ctrl-C, so that nothing is left behind."""
    raise Stopped(number)
