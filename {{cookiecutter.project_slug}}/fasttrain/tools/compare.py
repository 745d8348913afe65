"""``python -m fasttrain compare RUN RUN [...]``: what was changed between runs and what it brought, as a table.

With one seed the runs saw the same samples in the same order, so the difference is that of the settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.history import History, Rank
from fasttrain.records import PHASES
from fasttrain.window import Summary, Window


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain compare", description="Runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, the first is the measure")
    options = parser.parse_args(arguments)
    Console(markup=False, highlight=False, emoji=False).print(table(options.runs))
    return 0


def table(runs: Sequence[Path]) -> Table:
    """The settings that differ, then times and throughput of all batches but the first two, and the last validation."""
    found = [history.read(run) for run in runs]
    settings = [dict(_flat(run.settings)) for run in found]
    summaries = [summary(run) for run in found]
    last = [_last_validation(run.ranks[0]) for run in found]
    shown = Table("", *(run.name for run in runs))
    for key in sorted({key for each in settings for key in each}):
        values = [str(each.get(key)) for each in settings]
        if len(set(values)) > 1 and not key.startswith(("run.", "resume")):
            shown.add_row(key, *values)
    shown.add_section()
    shown.add_row("batches", *(str(each.batches) for each in summaries))
    shown.add_row("ms a batch", *(f"{each.wall * 1e3:.1f}" for each in summaries))
    for phase in PHASES:
        shown.add_row(phase, *(f"{each.phases[phase][0]:.1%}" for each in summaries))
    first = summaries[0].images_per_second
    shown.add_row("img/s", *(f"{s.images_per_second:,.0f} ({s.images_per_second / first:.2f}x)" for s in summaries))
    ratios = [each.data_ratio for each in summaries]
    shown.add_row("data/compute", *("n/a" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
    shown.add_section()
    for name in sorted({name for each in last for name in each}):
        shown.add_row(name, *(f"{each[name]:.4f}" if name in each else "n/a" for each in last))
    return shown


def summary(run: History) -> Summary:
    """All batches of rank 0 added up, the first two left out; images are those of all ranks.

    Raises:
        UserError: there are too few.
    """
    records = run.ranks[0].records
    workers = {record.worker for record in records} - {None}
    window = Window(max(1, len(records)), int(run.facts.get("world_size", 1)), len(workers))
    window.add(records)
    found = window.summary()
    if found is None:
        raise UserError(f"{run.directory}: {len(records)} batches are too few to compare: at least 3 are needed")
    return found


def _last_validation(rank: Rank) -> dict[str, float]:
    skipped = ("time", "epoch", "step", "improved")
    last: Mapping[str, Any] = next((e for e in reversed(rank.events) if e["event"] == "validation"), {})
    return {k: v for k, v in last.items() if k not in skipped and isinstance(v, (int, float))}


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(prefix[:-1], tree)]
    return [pair for name, value in tree.items() for pair in _flat(value, f"{prefix}{name}.")]
