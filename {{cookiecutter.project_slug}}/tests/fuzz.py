"""Hostile input by the thousand: ``make fuzz``, or ``PYTHONPATH=. python tests/fuzz.py [--count 10000] [--only tar]``.

Each input is a valid file changed at random (fuzz_*.py), so that the inside of its reader is reached, and read as a
training would read it. It has to end in success or in one line of a UserError. A crash, a hang, any other exception, a
program started, a connection made, or a file written outside of the folder given is a finding, named by target, seed
and number, so that it can be made again: ``--only tar --seed 0 --first 1234 --count 1``.

A target has `make(rng, folder)`, which writes one input, and `read(folder)`, which reads it.

Inputs run in forked processes, a hundred in each, so that a crash costs one input. Its time is measured in seconds of
the processor, so that a busy machine makes no findings.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_checkpoint import Checkpoint
from fuzz_data import Store, Tar
from fuzz_settings import Settings
from loguru import logger

from fasttrain.errors import UserError

TARGETS: dict[str, Callable[[Path], Any]] = {each.name: each for each in (Settings, Checkpoint, Store, Tar)}

TOGETHER = 100  # inputs of a process
CPU_SECONDS, WALL_SECONDS = 20, 300  # for one input
MEMORY = 4 << 30  # bytes that an input may take
FORBIDDEN = {
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.kill"),
    *("subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request"),
    *("ctypes.dlopen", "code.__new__", "webbrowser.open", "os.putenv", "builtins.input"),
}
CHANGES = {
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "os.mkfifo", "os.utime"),
}


@dataclass
class Outcome:
    """What became of a target's inputs. bad: number of the input -> what happened."""

    name: str
    read: int = 0
    refused: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = f"{self.read + self.refused + len(self.bad)} inputs: {self.read} read, {self.refused} refused"
        return f"{self.name}: {counts}, {len(self.bad)} bad; {self.seconds:.0f} s"


def run(name: str, count: int, seed: int = 0, first: int = 0) -> Outcome:
    """Try inputs `first` to `first + count - 1` of a target."""
    began, outcome = time.monotonic(), Outcome(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        where = Path(folder)
        target = TARGETS[name](where / "valid")
        at = first
        while at < first + count:
            at = _batch(target, outcome, seed, range(at, min(at + TOGETHER, first + count)), where / "work")
            if left := sorted(path.name for path in where.iterdir() if path.name not in ("valid", "work")):
                outcome.bad[at - 1] = f"wrote {left} beside its folder"
                return outcome
    outcome.seconds = time.monotonic() - began
    return outcome


def _batch(target: Any, outcome: Outcome, seed: int, numbers: range, work: Path) -> int:
    """Try these numbers in a process of their own. Returns the first number that was not tried."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        code = 1
        try:
            _child(target, seed, numbers, work, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    at = numbers.start
    with os.fdopen(reader, "rb") as results:
        for line in results:
            kind, text = line[:1], line[1:].decode(errors="replace").strip()
            if kind == b"+":
                outcome.read += 1
            elif kind == b"-":
                outcome.refused += 1
            else:
                outcome.bad[at] = text
            at += 1
    status = os.waitpid(child, 0)[1]
    if at < numbers.stop:  # it ended on this one
        code = os.waitstatus_to_exitcode(status)
        how = {-signal.SIGPROF: "a hang", -signal.SIGALRM: "a hang (asleep)"}.get(code, f"a crash, exit code {code}")
        outcome.bad[at] = how
        at += 1
    return at


def _child(target: Any, seed: int, numbers: range, work: Path, results: int) -> None:
    os.chdir(work)
    logger.remove()
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    broken: list[str] = []
    sys.addaudithook(_Watch(work, broken))
    for number in numbers:
        rng = random.Random(f"{target.name} {seed} {number}")
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(WALL_SECONDS)
        try:
            target.make(rng, work)
            target.read(work)
            said = b"+"
        except UserError as error:
            text = str(error)
            fine = text.isprintable() and len(text) < 3000
            said = b"-" if fine else b"!not one line: " + ascii(text)[:500].encode()
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"!{type(error).__name__} {ascii(str(error))[:300]} at {place.filename}:{place.lineno}".encode()
        if broken:
            said = f"!forbidden: {broken[0]}".encode()
            broken.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(results, said + b"\n")


class _Watch:
    """An audit hook: notes, and stops, what no reading of data may do."""

    def __init__(self, work: Path, broken: list[str]) -> None:
        self.work, self.broken = os.fspath(work), broken

    def __call__(self, event: str, arguments: Sequence[Any]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if not writes or not isinstance(path, (str, bytes, os.PathLike)):
                return
        elif event in CHANGES:
            path = arguments[1] if event in ("os.link", "os.symlink") else arguments[0]
        elif event in FORBIDDEN:
            path = "/"
        else:
            return
        full = os.path.abspath(os.fsdecode(path)) if not isinstance(path, int) else ""
        if not f"{full}{os.sep}".startswith(self.work + os.sep) and full != os.devnull:
            self.broken.append(f"{event} {ascii(arguments)[:200]}")
            raise PermissionError(f"{event} is forbidden here")


def main() -> int:
    parser = argparse.ArgumentParser(description="Read hostile input by the thousand.")
    parser.add_argument("--count", type=int, default=10_000, help="inputs of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", choices=list(TARGETS), action="append")
    options = parser.parse_args()
    bad = 0
    for name in options.only or TARGETS:
        outcome = run(name, options.count, options.seed, options.first)
        print(outcome, flush=True)
        for number, text in list(outcome.bad.items())[:20]:
            print(f"    --only {name} --seed {options.seed} --first {number} --count 1: {text}", flush=True)
        bad += len(outcome.bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
