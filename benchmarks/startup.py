"""How long it takes to begin:  python -m benchmarks.startup PROJECT [--write]

Rendering the template, beside an empty one; and from `python train.py` to the end of the first optimizer step, beside a
bare script that imports torch and takes one step. In turns; a row is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results

HERE = Path(__file__).resolve().parent

# The moment is told by the script itself: what the interpreter does at its end is in no training's way.
BARE = """
import time
import torch
net = torch.nn.Linear(10, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.zeros(4, 10)).sum().backward()
optimizer.step()
print(time.time())
"""
LIBRARIES = "import torch, torchvision\n" + BARE


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    arguments.add_argument("project", type=Path, help="a generated project")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--write", action="store_true", help="put the result into STARTUP.md")
    options = arguments.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        place = Path(folder)
        rows: dict[str, Callable[[], float]] = {
            "cookiecutter, an empty template": lambda: render(_empty(place), place),
            "cookiecutter, this template": lambda: render(HERE.parent, place),
            "bare script: torch, one step": lambda: script(BARE),
            "the same, torchvision imported": lambda: script(LIBRARIES),
            "train.py to its first step, 0 workers": lambda: train(options.project.resolve(), place, 0),
            "train.py to its first step, 2 workers": lambda: train(options.project.resolve(), place, 2),
        }
        seconds: dict[str, list[float]] = defaultdict(list)
        train(options.project.resolve(), place, 0)  # draws the demo's images and fills the page cache
        for number in range(options.rounds):
            for name, measure in rows.items():
                seconds[name].append(measure())
                console.print(f"round {number + 1}: {name}: {seconds[name][-1]:.2f} s", highlight=False)
    table = _rows(seconds)
    _show(console, table)
    if options.write:
        _write(HERE / "STARTUP.md", table, options.rounds)


def render(template: Path, place: Path) -> float:
    """Seconds of one `cookiecutter` process."""
    with tempfile.TemporaryDirectory(dir=place) as target:
        command = ["-m", "cookiecutter", "--no-input", "--default-config", "--output-dir", target, str(template)]
        began = time.perf_counter()
        _run([sys.executable, *command], place)
        return time.perf_counter() - began


def script(text: str) -> float:
    """Seconds from the start of a process to its first optimizer step."""
    began = time.time()
    return float(_run([sys.executable, "-c", text], HERE).split()[-1]) - began


def train(project: Path, place: Path, workers: int) -> float:
    """Seconds from the start of train.py to the end of its first optimizer step, as its own record says."""
    with tempfile.TemporaryDirectory(dir=place) as run:
        values = [f"run.dir={run}/run", f"data.root={place}/data", f"data.workers={workers}", "train.max_steps=1"]
        _run([sys.executable, str(project / "train.py"), *values, "amp=off"], place)
        first = json.loads(Path(run, "run", "rank0.jsonl").read_text().splitlines()[0])
        return float(first["time"])  # since the process was made


def _empty(place: Path) -> Path:
    """A template of one file."""
    folder = place / "empty"
    if not folder.exists():
        (folder / "{{cookiecutter.name}}").mkdir(parents=True)
        (folder / "{{cookiecutter.name}}" / "README.md").write_text("{{cookiecutter.name}}\n")
        (folder / "cookiecutter.json").write_text('{"name": "empty"}')
    return folder


def _run(command: list[str], where: Path) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


# ---- the table -------------------------------------------------------------------------------------------------------

HEAD = ("", "seconds", "lowest to highest", "x bare script")


def _rows(seconds: dict[str, list[float]]) -> list[tuple[str, ...]]:
    bare = statistics.median(seconds["bare script: torch, one step"])
    rows: list[tuple[str, ...]] = []
    for name, times in seconds.items():
        middle = statistics.median(times)
        ratio = "" if name.startswith("cookiecutter") else f"{middle / bare:.2f}"
        rows.append((name, f"{middle:.2f}", f"{min(times):.2f} to {max(times):.2f}", ratio))
    return rows


def _show(console: Console, rows: list[tuple[str, ...]]) -> None:
    table = Table(title="the time to begin")
    for name in HEAD:
        table.add_column(name, justify="right" if name else "left")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def _write(path: Path, rows: list[tuple[str, ...]], rounds: int) -> None:
    lines = [
        "# The time to begin",
        "",
        f"{date.today()}, {results.machine(os.cpu_count() or 1)}, no GPU; Python {platform.python_version()}, "
        f"torch {version('torch')}, cookiecutter {version('cookiecutter')}.",
        f"`make startup`: medians of {rounds} rounds, in turns, files in the page cache. train.py trains the demo",
        "as it comes, in float32; its time runs from the start of the process to the end of the first optimizer step.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|---|{'---:|' * (len(HEAD) - 1)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
    ]
    path.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
