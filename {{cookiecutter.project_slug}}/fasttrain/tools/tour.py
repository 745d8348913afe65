"""``python -m fasttrain tour``: the typical report from its beginning to its end, on this machine, in minutes.

Photos as a camera makes them, no loader workers, a device that takes 80 ms a batch: it waits most of the time. Then the
verdict on that, ``tune``, ``pack``, and a table of the whole way. The photos are made on the spot, and the device is a
stand-in that sleeps, so the tour needs neither a download nor a GPU; what loads the batches is the real thing.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fasttrain import history, judge, machine
from fasttrain.errors import UserError
from fasttrain.folder import printable
from fasttrain.tools import photos
from fasttrain.tools.trials import Measured, Runs, environment, reason
from fasttrain.tools.tune import SECONDS, Say, add_measures, arguments_of, middle, scratch, terminate, tune

PHOTOS = 400
STEP = 80  # ms
TYPICAL = (
    "model.name=stand_in",
    f"model.stand_in_ms={STEP}",
    "data.batch_size=32",
    "data.image_size=224",
    "data.crop_scale=[0.08,1]",
    "data.workers=0",
    "data.prefetch_factor=4",
    "run.threads=null",
)
HOLDS = "model.stand_in_holds_interpreter=true"
DEFINITIONS = """\
waiting for data: the part of the time between two batches until the loader hands one over
device busy: the part of forward, backward and optimizer; here the stand-in, and normalising the images for it"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain tour", description="The typical report, replayed.")
    parser.add_argument("--photos", type=Path, help="a folder of real photos instead of made ones")
    parser.add_argument("--count", type=int, default=PHOTOS, help=f"photos to make (default: {PHOTOS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each run (default: {SECONDS:g})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change for all runs")
    options = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, terminate)
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    began = time.monotonic()
    with scratch("tour") as folder:
        for shown in tour(folder, options, console.print):
            console.print(shown)
    console.print(f"\nThe tour took {time.monotonic() - began:.0f} s; config.yaml is as it was, and nothing is left.")
    return 0


def tour(folder: Path, options: argparse.Namespace, say: Say) -> list[Table | str]:
    """All of it; the two tables of the way, and what they come to."""
    say(f"A training that waits for its data, and what becomes of it. {machine.cores()} cores.\n")
    root = _photos(folder, options, say)
    typical = [*TYPICAL, f"data.path={root}", *options.overrides]
    say(f"The device is a stand-in: it sleeps {STEP} ms a batch. Loading, decoding and copying are real.")

    say("\n1. The report: no loader workers, batches of 32")
    before, run = Runs(typical, _in(folder, "before"), 2 * options.seconds).measure()
    say(f"   {before.images_per_second:.0f} img/s; the device is busy {before.busy:.0%} of the time")
    for line in verdict(run):
        say(f"   {line}")

    say("\n2. python -m fasttrain tune")
    outcome = tune(typical, _in(folder, "tune"), 1, options.seconds, False, lambda text: say(f"   {text}"))
    tuned = arguments_of(outcome.changes)

    say("\n3. python -m fasttrain pack: decode once, crop and flip still drawn anew each time")
    store = folder / "store"
    _pack(root, store, folder / "pack.txt")
    size = sum(file.stat().st_size for file in store.iterdir()) / 1e6
    packed = [*tuned, f"data.path={store}"]
    say(f"   the store has {size:,.0f} MB")
    after = [Runs(typical, _in(folder, "packed"), 2 * options.seconds).measure(packed)[0]]

    say("\n4. The same with a stand-in that holds the interpreter meanwhile, as launching many tiny kernels does")
    held = Runs([*typical, HOLDS], _in(folder, "holds"), options.seconds)
    holding = [held.measure(settings)[0] for settings in ((), tuned, packed)]

    # Where the proof rejects what tune tried, the settings stay: so do the numbers.
    columns = [middle(outcome.before), middle(outcome.after if outcome.changes else outcome.before), *after]
    named = {key: [outcome.values[key], *[outcome.changes.get(key, outcome.values[key])] * 2] for key in outcome.values}
    say("\nThe whole way\n")
    tables = [_table("device sleeps", columns, named), _table("holds the interpreter", holding, {})]
    return [*tables, _sum(columns), DEFINITIONS]


def verdict(run: Path) -> list[str]:
    """What the judge says of a run."""
    found = history.read(run)
    return judge.judge(found.ranks, found.settings, found.facts).lines()


def _table(title: str, runs: Sequence[Measured], named: dict[str, list[object]]) -> Table:
    shown = Table(title, "as it was", "tune", "tune + pack")
    for key, values in named.items():
        shown.add_row(key, *("null" if value is None else str(value) for value in values))
    add_measures(shown, runs)
    return shown


def _sum(runs: Sequence[Measured]) -> str:
    first, last = runs[0], runs[-1]
    times = last.images_per_second / first.images_per_second
    return (
        f"device busy {first.busy:.0%} -> {runs[1].busy:.0%} -> {last.busy:.0%}, {times:.1f} times the images a second"
    )


def _photos(folder: Path, options: argparse.Namespace, say: Say) -> Path:
    if options.photos is not None:
        if not options.photos.is_dir():
            raise UserError(f"{printable(options.photos)}: there is no such folder of photos")
        say(f"Photos: those in {printable(options.photos)}.")
        return Path(options.photos).absolute()
    began = time.monotonic()
    mean = photos.make(folder / "photos", options.count, machine.cores())
    spent = time.monotonic() - began
    what = f"{options.count} JPEGs of {photos.WIDTH} x {photos.HEIGHT} pixels, {mean / 1e3:.0f} KB each on average"
    say(f"Photos: {what}, made on the spot in {spent:.0f} s from noise at several scales.")
    return folder / "photos"


def _pack(root: Path, store: Path, output: Path) -> None:
    command = [sys.executable, "-m", "fasttrain", "pack", str(root), str(store)]
    with output.open("wb") as file:
        done = subprocess.run(command, env=environment(), stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise UserError(reason(output))


def _in(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
