"""``python -m fasttrain report RUN [RUN ...] [--watch | --serve]``: runs as one HTML page that needs nothing else.

The page goes into the first run's directory. ``--watch`` keeps it up to date while a training runs; ``--serve`` shows
it on this machine's own address instead, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.tools.report_data import prepare
from fasttrain.tools.report_page import page
from fasttrain.tools.report_serve import Server

FILE = "report.html"
MOST_RUNS = 8  # that colours tell apart
PART = 0.2  # of a core, that keeping a page up to date may take: the training needs it more


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain report", description="Runs as one HTML page.")
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories; the page goes into the first"
    )
    parser.add_argument("--watch", action="store_true", help="rewrite it while the training runs, until Ctrl-C")
    parser.add_argument("--serve", action="store_true", help="show it at http://127.0.0.1, up to date; write nothing")
    parser.add_argument("--port", type=int, default=8765, help="for --serve; 0 takes any free one (default: 8765)")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between updates (default: 5)")
    options = parser.parse_args(arguments)
    if len(options.runs) > MOST_RUNS:
        raise UserError(f"{len(options.runs)} runs: at most {MOST_RUNS} can be told apart on one page")
    every = max(0.2, options.every)
    if options.serve:
        return _serve(options.runs, every, options.port)
    target = options.runs[0] / FILE
    if options.watch:
        return _watch(options.runs, every, target)
    write(build(options.runs), target)
    print(f"{target}: {target.stat().st_size / 1e6:.1f} MB, open it in a browser")
    return 0


def build(runs: Sequence[Path], live: float | None = None) -> str:
    """The page of these run directories.

    Raises:
        UserError: one of them holds no run, or can't be read.
    """
    return page([prepare(history.read(run), name) for run, name in zip(runs, names(runs), strict=True)], live)


def names(runs: Sequence[Path]) -> list[str]:
    """The folders' names; with as much of the path before them as makes them differ."""
    whole = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, whole)) + 1):
        short = ["/".join(parts[-length:]) for parts in whole]
        if len(set(short)) == len(set(whole)):
            break
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]


def write(text: str, target: Path) -> None:
    """Put the page there as a whole: who reads meanwhile gets the old one.

    Raises:
        UserError: it can't be written.
    """
    whole = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        whole.write_text(text, encoding="utf-8", errors="backslashreplace")
        whole.replace(target)
    except OSError as error:
        raise UserError(f"{target}: can't be written ({error.strerror}); --serve shows it without writing") from error


def _watch(runs: Sequence[Path], every: float, target: Path) -> int:
    print(f"{target}: kept up to date, open it in a browser; Ctrl-C ends it")
    try:
        _follow(runs, lambda live: write(build(runs, live), target), every)
    except KeyboardInterrupt:
        write(build(runs), target)  # one that doesn't look for the next
    return 0


def _serve(runs: Sequence[Path], every: float, port: int) -> int:
    with Server(port) as server:
        server.show(build(runs, every))
        print(f"{server.address} (only from this machine; Ctrl-C ends it)", flush=True)
        with suppress(KeyboardInterrupt):
            _follow(runs, lambda live: server.show(build(runs, live)), every)
    return 0


def _follow(runs: Sequence[Path], update: Callable[[float], None], every: float) -> NoReturn:
    """Update whenever a run has changed. Ends by Ctrl-C or SIGTERM only, as KeyboardInterrupt."""
    signal.signal(signal.SIGTERM, _interrupt)
    if hasattr(os, "nice"):
        os.nice(10)
    pause = every
    seen: list[tuple[str, int, int]] | None = None
    while True:
        now = _state(runs)
        if now != seen:
            began = time.process_time()
            try:
                update(pause)
            except UserError as error:  # a disk that is full for a while, say
                sys.stderr.write(f"not updated: {error}\n")
            else:
                # The first page took longer: what draws had to start.
                pause = every if seen is None else max(every, (time.process_time() - began) / PART)
                seen = now
        time.sleep(pause)


def _state(runs: Sequence[Path]) -> list[tuple[str, int, int]]:
    """What changes when a run goes on."""
    kinds = ("rank*.jsonl", "events*.jsonl", "rank*.log", "run.json")
    files = sorted(path for run in runs for kind in kinds for path in run.glob(kind))
    return [(str(path), status.st_size, status.st_mtime_ns) for path in files for status in (path.stat(),)]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
