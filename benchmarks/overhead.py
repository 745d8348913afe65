"""What a harness costs a training, in microseconds a step:  python -m benchmarks.overhead PROJECT [--write]

The project's own train.py, with everything on and with its parts switched off in turn, against the bare PyTorch loop
and against Lightning, Accelerate and TraceML, on the same tiny network and the same batches in memory. What each loop
does stands in overhead_loops.py. Each runs in a process of its own, one after another, in rounds that begin with
another loop each time; a row is the median of its rounds. A peer that isn't installed is named as missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import pty
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results

HERE = Path(__file__).resolve().parent
LIMIT = 180  # seconds for one run


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    loop: str  # of overhead_loops.py
    needs: str = ""  # package
    disk: str = ""  # blocked, full


ROWS = (
    Row("bare PyTorch loop", "bare"),
    Row("ours, nothing watched", "loop"),
    Row("+ stopwatch", "watch"),
    Row("+ recorder", "recorder"),
    Row("+ looks at where the training stands", "looks"),
    Row("+ gauges", "gauges"),
    Row("+ verdict", "verdict"),
    Row("+ dashboard: ours, everything on", "ours"),
    Row("ours, the records' disk blocked", "ours", disk="blocked"),
    Row("ours, the disk of records and log full", "ours", disk="full"),
    Row("ours, and a line to the log file in every step", "log"),
    Row("Accelerate, prepared network and optimizer", "accelerate", "accelerate"),
    Row("TraceML, trace_step", "traceml", "traceml-ai"),
    Row("Lightning, all extras off", "lightning-off", "lightning"),
    Row("Lightning as it comes, loss logged", "lightning", "lightning"),
)


class Failed(Exception):
    """A loop did not end well; the text is the end of what it printed."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    arguments.add_argument("project", type=Path, help="a generated project, or the template's folder")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=4000, help="counted steps of a run")
    arguments.add_argument("--only", nargs="+", metavar="LOOP", help="some of the loops")
    arguments.add_argument("--write", action="store_true", help="put the result into OVERHEAD.md")
    options = arguments.parse_args()
    chosen = [row for row in ROWS if not options.only or row.loop in (*options.only, "bare")]
    missing = [row for row in chosen if row.needs and not _installed(row.needs)]
    rows = [row for row in chosen if row not in missing]
    console = Console()
    found: dict[Row, list[dict[str, float]]] = {row: [] for row in rows}
    notes: dict[Row, str] = {}
    for number in range(options.rounds):
        for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
            try:
                result, note = run(row, options.project.resolve(), options.steps)
            except (Failed, subprocess.TimeoutExpired) as error:
                notes[row] = f"failed: {error}"
                continue
            found[row].append(result)
            notes.setdefault(row, note)
            console.print(f"round {number + 1}: {row.name}: {result['mean']:.0f} us a step", highlight=False)
    table = [line(row, found[row], found[rows[0]], notes.get(row, "")) for row in rows if found[row]]
    table += [(row.name, *("",) * 6, notes[row]) for row in rows if not found[row]]
    table += [(row.name, *("",) * 6, f"{row.needs} is not installed") for row in missing]
    show(console, table)
    call = call_costs(options.project.resolve())
    for text in call:
        console.print(text, highlight=False)
    if options.write:
        write(HERE / "OVERHEAD.md", table, call, options)


def run(row: Row, project: Path, steps: int) -> tuple[dict[str, float], str]:
    """One run of one loop, and what its log says of lost records."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder, contextlib.ExitStack() as stack:
        result = Path(folder, "result.json")
        directory = result.with_suffix(".run")
        directory.mkdir()
        if row.disk == "blocked":
            stack.enter_context(_blocked(directory / "rank0.jsonl"))
        elif row.disk == "full":
            for name in ("rank0.jsonl", "events0.jsonl", "rank0.log"):
                (directory / name).symlink_to("/dev/full")  # every write fails: no space left on device
        command = [sys.executable]
        if row.needs == "traceml-ai":
            command = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", "--logs-dir", f"{folder}/logs"]
            command += ["--aggregator-port", str(_free_port())]
        script = str(HERE / "overhead_loops.py")
        values = [str(project), row.loop, str(steps), str(result)]
        command += [script, *(["--args", *values] if row.needs == "traceml-ai" else values)]
        output = _on_a_terminal(command, Path(folder))
        if not result.exists():
            raise Failed(" ".join(output.split())[-300:])
        said = re.findall(r"((?:at least )?\d+) records are missing", output)
        return dict(json.loads(result.read_text())), f"{said[-1]} records missing, as the log said" if said else ""


def _on_a_terminal(command: list[str], folder: Path) -> str:
    """Run a command on a terminal of 100 x 40, so that live displays are drawn; what it printed."""
    master, slave = pty.openpty()
    subprocess.run(["stty", "rows", "40", "cols", "100"], stdin=slave, check=False)
    environment = {**os.environ, "TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("CI", None)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    parts: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(master, parts), daemon=True)
    reader.start()
    try:
        process.wait(LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
        process.wait()
        reader.join(2)
        os.close(master)
    return b"".join(parts).decode(errors="replace")


def _drain(master: int, parts: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while got := os.read(master, 1 << 16):
            parts.append(got)


@contextlib.contextmanager
def _blocked(path: Path) -> Iterator[None]:
    """A pipe that is full and never read, in the place of a file: a write to it never returns."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"\n" * 4096)
        yield
    finally:
        os.close(pipe)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _installed(package: str) -> bool:
    return importlib.util.find_spec("traceml_ai" if package == "traceml-ai" else package) is not None


# ---- one call --------------------------------------------------------------------------------------------------------

CALLS = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from loguru import logger
from fasttrain import logs, records
directory = Path(sys.argv[2])
record = records.BatchRecord(0, 1, 1.0, *(0.001,) * 7, 64, 0.5, 0.1, 0.01, 0, 3)
def cost(call, count):
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count * 1e6
records.PATIENCE = 0.5
with logs.start(directory, 0, "INFO"):
    recorder = records.Recorder(directory, 0, time.time())
    batch = cost(lambda: recorder.batch(record), 50_000)
    skipped = cost(lambda: logger.debug("not wanted"), 50_000)
    line = cost(lambda: logger.bind(only="file").info("a line of {}", 1), 2_000)
    recorder.close()
print(json.dumps([batch, skipped, line]))
"""


def call_costs(project: Path) -> list[str]:
    """Sentences on what one call costs the training thread, with the disk well and with it blocked."""
    texts = []
    for blocked in (False, True):
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder, contextlib.ExitStack() as stack:
            if blocked:
                stack.enter_context(_blocked(Path(folder, "rank0.jsonl")))
            command = [sys.executable, "-c", CALLS, str(project), folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            batch, skipped, line = json.loads(done.stdout)
            texts.append(
                f"One call on the training thread{', the disk blocked' * blocked}: a record {batch:.2f} us; "
                f"a log line below the level {skipped:.1f} us, one that is written {line:.0f} us."
            )
    return texts


# ---- the table -------------------------------------------------------------------------------------------------------

HEAD = ("loop", "us a step", "lowest-highest", "over bare", "x bare", "median step over bare", "CPU over bare", "note")


def line(row: Row, mine: list[dict[str, float]], bare: list[dict[str, float]], note: str) -> tuple[str, ...]:
    """The cells of a row: medians over the rounds; differences are those of the medians."""
    means = [each["mean"] for each in mine]
    mean, zero = statistics.median(means), statistics.median(each["mean"] for each in bare)
    more = [
        f"{statistics.median(e[k] for e in mine) - statistics.median(e[k] for e in bare):+.0f}"
        for k in ("median", "cpu")
    ]
    span = f"{min(means):.0f}-{max(means):.0f}"
    if row.loop == "bare":
        return row.name, f"{mean:.0f}", span, "", "1.00", "", "", note
    return row.name, f"{mean:.0f}", span, f"{mean - zero:+.0f}", f"{mean / zero:.2f}", *more, note


def show(console: Console, rows: list[tuple[str, ...]]) -> None:
    table = Table(title="the cost of a step")
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("loop", "note") else "right")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def write(path: Path, rows: list[tuple[str, ...]], calls: list[str], options: argparse.Namespace) -> None:
    """The result with what it was measured on."""
    packages = [name for name in ("torch", "lightning", "accelerate", "traceml-ai") if _version(name)]
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    text = [
        "# The cost of a step",
        "",
        f"{date.today()}, {results.machine(os.cpu_count() or 1)}, {platform.system()}, no GPU; Python",
        f"{platform.python_version()}, {versions}. `make overhead`: {options.rounds} rounds of {options.steps} steps",
        "after 500 that don't count, each loop in a process of its own, in turns, one thread, on a terminal.",
        "",
        "A step is the time from one request for a batch to the next. All loops normalise the same uint8 batches of",
        "64, train the same tiny network by the same fused SGD, and read no loss. Ours also follows its learning-rate",
        "schedule, seeds each batch, looks the batch up in its slot, and keeps a record with the loss of every step;",
        "the loader itself is left out everywhere. The mean step holds what other threads take from the interpreter;",
        "the median one is what the training thread does itself. CPU time is that of all threads of the process.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|---|{'---:|' * (len(HEAD) - 2)}---|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
        *calls,
        "",
    ]
    path.write_text("\n".join(text))


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return ""


if __name__ == "__main__":
    main()
