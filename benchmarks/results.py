"""The tables, for the terminal and for RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.rows import Group

if TYPE_CHECKING:
    from benchmarks.run import Result

COLUMNS = ("", "img/s", "of all rounds", "this project is", "to reach", "CPU ms/img", "pixels", "conversion")
# fmt: off
PACKAGES = (
    "torch", "torchvision", "numpy", "pillow", "simplejpeg", "opencv-python-headless", "lmdb", "timm", "webdataset",
    "litdata", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "spdl", "torchdata", "ffcv", "numba",
)
# fmt: on


@dataclass
class Rendered:
    """A table as text: one list of cells a row, in the order of COLUMNS."""

    title: str
    rows: list[list[str]]
    columns: Sequence[str] = COLUMNS


def table(group: Group, results: Sequence[Result]) -> Rendered:
    """Medians over the rounds; the ratio is the median of the ratios within each round."""
    ours = next(result for result in results if result.row.peer == "project")
    rows = []
    for result in results:
        title, reach = result.row.title, result.row.reach
        if result.note or not result.speeds:
            rows.append([title, result.note or "not measured", *[""] * (len(COLUMNS) - 2)])
            continue
        low, high = min(result.speeds), max(result.speeds)
        ratio = "" if result is ours or ours.note else f"{ratio_of(ours.speeds, result.speeds):.2f} times"
        converted = f"{result.convert_seconds:.0f} s, {result.megabytes:,.0f} MB" if result.megabytes else ""
        rows.append(
            [
                title,
                f"{statistics.median(result.speeds):,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                ratio,
                "" if reach is None else f"{reach:g}",
                f"{statistics.median(result.cpu_ms):.3f}",
                "" if result.pixels is None else f"{result.pixels:.2f}",
                converted,
            ]
        )
    return Rendered(group.title, rows)


def steps_table(costs: dict[str, dict[str, float]]) -> Rendered:
    """What `steps.measure` found, one column a kind of photos."""
    names = next(iter(costs.values()))
    rows = [[name, *(f"{found[name]:.3f}" for found in costs.values())] for name in names]
    return Rendered("One core, one photo: ms", rows, ("", *costs))


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast: the median over the rounds, since machines change their speed between rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=False))


def shown(rendered: Rendered) -> Table:
    """For the terminal."""
    found = Table(*rendered.columns, title=rendered.title, title_justify="left")
    for row in rendered.rows:
        found.add_row(*row)
    return found


def markdown(rendered: Rendered) -> str:
    lines = [f"### {rendered.title}", "", _line(rendered.columns), "|---" * len(rendered.columns) + "|"]
    return "\n".join([*lines, *map(_line, rendered.rows)])


def page(tables: Sequence[Rendered], options: argparse.Namespace, cores: int, command: str, minutes: float) -> str:
    """RESULTS.md."""
    about = [
        "# Results",
        "",
        f"{datetime.date.today():%Y-%m-%d}, {machine(cores)}. Written by `{command}` in {minutes:.0f} minutes: "
        f"{options.rounds} rounds of {options.seconds:g} s, all competitors in turns, each in a process of its own.",
        "",
        f"{options.workers} workers or threads, batches of 64, random resized crop (area 8 to 100 %, ratio 3/4 to 4/3) "
        "to 224 x 224, flip, uint8, every page of a batch read by the consumer, page cache warm. README.md explains "
        "the columns.",
        "",
        f"Versions: {versions()}.",
        "",
    ]
    return "\n".join([*about, *(markdown(rendered) + "\n" for rendered in tables)])


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def machine(cores: int) -> str:
    """Cores, processor and memory."""
    import psutil

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:  # not Linux
        pass
    return f"{cores} cores of {name}, {psutil.virtual_memory().total / 1e9:.0f} GB"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
