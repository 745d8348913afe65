"""Are the verdicts right? Plants faults in real trainings and counts what is found; judges healthy ones, too.

    make planted                          every kind in 5 runs, the healthy ones in 8: about 25 minutes on 2 cores
    make planted RUNS=2 ONLY=jitter,rank  kinds whose name contains one of these
    python tests/planted.py --help

Copies and pinning can't be planted without a GPU: tests/test_judge.py judges them on paper.

Prints a line a run and the confusion table. Exits with 1 if under 98 % of the faults are named, or over 1 % of the
healthy windows accused; with 2 if no kind has such a name.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HOME), str(HOME / "tests")]

from plants import BASE, HEALTHY, PLANTS, Plant  # noqa: E402

from fasttrain import history, shapes  # noqa: E402
from fasttrain.judge import Verdict, judge  # noqa: E402

TIME_LIMIT = 240  # seconds for a run
WINDOW = 1.4  # seconds of a healthy run that are judged by themselves
RIGHT, FALSE = 0.98, 0.01  # what is to be reached
GROUP = Path("/sys/fs/cgroup")


class Bench:
    """Runs trainings in a folder of its own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.count = folder, seed, 0
        shapes.draw(folder / "long", train_per_class=500, val_per_class=1)
        shapes.draw(folder / "short", train_per_class=20, val_per_class=20)
        shapes.draw(folder / "short_val", train_per_class=20, val_per_class=1)
        self.projects: dict[str, Path] = {}

    def run(self, name: str, plant: Plant, seed: int) -> Path:
        """One training, to its end; the run directory."""
        if name not in self.projects:
            self.projects[name] = plant.write(HOME, self.folder / f"project{len(self.projects)}")
        self.count += 1
        target = self.folder / f"run{self.count}"
        images = "long" if not plant.short_epochs else "short" if plant.expect == "validation" else "short_val"
        settings = [*BASE, *plant.settings, f"data.path={self.folder / images}", f"train.max_steps={plant.steps}"]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plant.processes}"]
        command = [sys.executable, *(launcher if plant.processes > 1 else []), str(self.projects[name] / "train.py")]
        with quota(plant.cores) as prefix:
            done = subprocess.run(
                [*prefix, *command, *settings, f"run.dir={target}", f"seed={seed}"],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{name}: the training failed\n{done.stdout[-3000:]}")
        return target


@contextmanager
def quota(cores: float | None) -> Iterator[list[str]]:
    """What stands in front of a command so that it gets so many cores: a control group, or where none can be made,
    one core by its affinity."""
    if cores is None:
        yield []
        return
    for root, files in (
        (GROUP / "cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(round(cores * 1e5))}),
        (GROUP, {"cpu.max": f"{round(cores * 1e5)} 100000"}),
    ):
        group = root / f"planted-{os.getpid()}"
        try:
            group.mkdir()
            for name, value in files.items():
                (group / name).write_text(value)
        except OSError:
            continue
        try:
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        finally:
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        return
    yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


def verdicts(directory: Path, windows: bool) -> list[Verdict]:
    """Of the whole run, and with `windows` of pieces of it that do not overlap."""
    run = history.read(directory)
    found = [judge(run.ranks, run.settings, run.facts)]
    if windows:
        begin, end = (run.ranks[0].records[i].time for i in (4, -1))
        for i in range(int((end - begin) / WINDOW)):
            piece = [history.between(rank, begin + i * WINDOW, begin + (i + 1) * WINDOW) for rank in run.ranks]
            found.append(judge(piece, run.settings, run.facts))
    return [verdict for verdict in found if verdict.enough]


def first(verdict: Verdict) -> str:
    return verdict.findings[0].cause if verdict.findings else "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each fault")
    parser.add_argument("--healthy", type=int, help="runs of each healthy training (8; 0 leaves them out)")
    parser.add_argument("--only", default="", help="kinds whose name contains this; commas divide several")
    parser.add_argument("--keep", type=Path, help="keep projects and runs in this new folder")
    options = parser.parse_args()
    healthy = (8 if options.runs == 5 else options.runs) if options.healthy is None else options.healthy
    wanted = [part.strip() for part in options.only.split(",")]
    for part in wanted:
        if not any(part in name for name in (*PLANTS, *HEALTHY)):
            parser.error(f"no kind has {part!r} in its name; there are: {', '.join((*PLANTS, *HEALTHY))}")
    plans = [(name, plant, options.runs) for name, plant in PLANTS.items() if any(part in name for part in wanted)]
    plans += [(name, plant, healthy) for name, plant in HEALTHY.items() if any(part in name for part in wanted)]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="planted-"))
    folder.mkdir(exist_ok=True)
    try:
        return count(Bench(folder, 0), plans)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def count(bench: Bench, plans: list[tuple[str, Plant, int]]) -> int:
    """Run it all, the kinds taking turns, and print what was found."""
    todo = [(round_, name, plant) for name, plant, runs in plans for round_ in range(runs)]
    random.Random(0).shuffle(todo)
    todo.sort(key=lambda each: each[0])
    table: dict[str, Counter[str]] = defaultdict(Counter)
    hits: Counter[str] = Counter()
    began = time.monotonic()
    for number, (round_, name, plant) in enumerate(todo, 1):
        at = time.monotonic()
        try:
            found = verdicts(bench.run(name, plant, seed=round_), windows=plant.expect is None)
        except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
            table[name]["failed"] += 1
            say(f"[{number}/{len(todo)}] {name}: {error}")
            continue
        names = [first(verdict) for verdict in found] or ["not enough evidence"]
        table[name].update(names)
        hits[name] += sum(right(plant, verdict) for verdict in found)
        say(f"[{number}/{len(todo)}] {name}: {', '.join(sorted(set(names)))} ({time.monotonic() - at:.1f} s)")
        for verdict in found:
            if not right(plant, verdict):
                say("\n".join(f"    {line}" for line in verdict.lines()))
    say(f"{time.monotonic() - began:.0f} s\n")
    return summary(table, hits)


def right(plant: Plant, verdict: Verdict) -> bool:
    if plant.expect is None:
        return not verdict.findings
    told = bool(verdict.findings) and verdict.findings[0].cause == plant.expect
    return told and plant.rank in (None, verdict.findings[0].rank)


def summary(table: dict[str, Counter[str]], hits: Counter[str]) -> int:
    """The confusion table; the exit code."""
    code = 0
    kinds = [name for name in PLANTS if name in table]
    if kinds:
        say("| planted | has to come first | came first, in runs | right |\n|---|---|---|---|")
        for name in kinds:
            runs = sum(table[name].values())
            say(f"| {name} | {PLANTS[name].expect} | {listed(table[name])} | {hits[name]} of {runs} |")
        hit, total = sum(hits[name] for name in kinds), sum(sum(table[name].values()) for name in kinds)
        say(f"\nnamed: {hit} of {total} runs, {hit / total:.1%} (at least {RIGHT:.0%})\n")
        code = int(hit < RIGHT * total)
    kinds = [name for name in HEALTHY if name in table]
    if kinds:
        say("| healthy | judged windows | not accused | found |\n|---|---|---|---|")
        for name in kinds:
            say(f"| {name} | {sum(table[name].values())} | {hits[name]} | {listed(table[name])} |")
        windows = sum(sum(table[name].values()) for name in kinds)
        alarms = windows - sum(hits[name] for name in kinds)
        say(f"\nfalse alarms: {alarms} of {windows} windows, {alarms / windows:.1%} (at most {FALSE:.0%})")
        code = code or int(alarms > FALSE * windows)
    return code


def listed(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.most_common())


say: Callable[[str], None] = lambda text: print(text, flush=True)  # noqa: E731


if __name__ == "__main__":
    sys.exit(main())
