"""``python -m fasttrain compare RUN RUN [...]``: what was changed between runs and what it brought, as a table.

With one seed the runs saw the same samples in the same order, so the difference is that of the settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from fasttrain.errors import UserError
from fasttrain.records import PHASES, BatchRecord
from fasttrain.window import Summary, Window


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain compare", description="Runs side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories, the first is the measure")
    options = parser.parse_args(arguments)
    Console(markup=False, highlight=False, emoji=False).print(table(options.runs))
    return 0


def table(runs: Sequence[Path]) -> Table:
    """The settings that differ, then times and throughput of all batches but the first two, and the last validation."""
    settings = [dict(_flat(_yaml(run / "config.yaml"))) for run in runs]
    summaries = [summary(run) for run in runs]
    last = [_last_validation(run) for run in runs]
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


def summary(run: Path) -> Summary:
    """All batches of rank 0 added up, the first two left out; images are those of all ranks.

    Raises:
        UserError: there are no records, or too few.
    """
    records = [BatchRecord(**_known(row)) for row in _rows(run / "rank0.jsonl") if "wall" in row]
    workers = {record.worker for record in records} - {None}
    world = int(_json((run / "run.json").read_text()).get("world_size", 1)) if (run / "run.json").exists() else 1
    window = Window(max(1, len(records)), world, len(workers))
    window.add(records)
    found = window.summary()
    if found is None:
        raise UserError(f"{run}: {len(records)} batches are too few to compare: at least 3 are needed")
    return found


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in BatchRecord._fields if name in row}


def _last_validation(run: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in _rows(run / "events0.jsonl"):
        if row.get("event") == "validation":
            skipped = ("time", "epoch", "step", "improved")
            found = {k: v for k, v in row.items() if k not in skipped and isinstance(v, (int, float))}
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}): is this a run directory?") from None
    return [row for row in map(_json, lines) if row]


def _json(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except ValueError:  # the last line of a run that was killed
        return {}
    return row if isinstance(row, dict) else {}


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: can't be read ({' '.join(str(error).split())[:200]}): is this a run directory?"
        ) from None


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(prefix[:-1], tree)]
    return [pair for name, value in tree.items() for pair in _flat(value, f"{prefix}{name}.")]
