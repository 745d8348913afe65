"""What holds a training back, judged from its run directory, of a training that runs or ended long ago."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.judge import judge


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain judge", description=__doc__)
    parser.add_argument("run", nargs="+", type=Path, help="run directory, such as runs/2026-01-31_12-00-00")
    parser.add_argument("--last", type=float, metavar="SECONDS", help="judge only the last so many seconds of it")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run instead")
    options = parser.parse_args(arguments)
    if options.last is not None and options.last <= 0:
        raise UserError(f"--last {options.last:g}: expected more than 0 seconds")
    for directory in options.run:
        run = history.read(directory)
        ranks = run.ranks if options.last is None else [history.last(rank, options.last) for rank in run.ranks]
        verdict = judge(ranks, run.settings, run.facts)
        if options.json:
            sys.stdout.write(json.dumps({"run": str(directory), **asdict(verdict)}) + "\n")
        else:
            sys.stdout.write("\n".join([str(directory), *verdict.lines()]) + "\n")
    return 0
