"""`make bench`: this project beside its peers, each in a process of its own, in turns, and the table of it.

    python -m benchmarks.run [--photos FOLDER] [--project FOLDER] [--groups small,camera,raw,jpeg] [--peers ...]
                             [--rounds 3] [--seconds 4] [--write]

See README.md beside this file for what is equal among them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import photos, results, steps
from benchmarks.rows import GROUPS, Group, Row
from benchmarks.work import Work, files, module

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parent / "{{cookiecutter.project_slug}}"
REPEATS = {"small": 4, "camera": 3}  # hard links, so that an epoch is longer than a measurement
PATIENCE = 300.0  # seconds for one measurement


@dataclass
class Result:
    """What was found out about one row. speeds and cpu_ms: one a round."""

    row: Row
    note: str = ""
    data: str = ""
    convert_seconds: float = 0.0
    megabytes: float = 0.0
    pixels: float | None = None
    speeds: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)


class Bench:
    """Measurements on this machine.

    Args:
        options: of the command line. In `work` is kept what is converted, so that a second run begins at once: other
            photos, and another format of the project's packed stores, get a folder of their own.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options, self.console = options, console
        photo_folder, project = Path(options.photos).resolve(), Path(options.project)
        form = module(Work(photo_folder, photo_folder, project), "fasttrain.packed").FORMAT
        name = hashlib.sha256(f"{photo_folder} {form}".encode()).hexdigest()[:12]
        self.folder = Path(options.work) / name
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def run(self, groups: Sequence[Group], peers: Sequence[str]) -> dict[str, list[Result]]:
        found = {}
        for group in groups:
            rows = [row for row in group.rows if not peers or row.peer in (*peers, "project", "limit")]
            found[group.name] = [self._prepared(group, row) for row in rows]
        for number in range(self.options.rounds):
            for group in groups:
                for result in found[group.name]:
                    if not result.note:
                        self._measure(group, result, number)
        return found

    def steps(self, kind: str) -> dict[str, float]:
        """Milliseconds of each step on one core, see steps.py."""
        return steps.measure(Path(self.options.photos) / kind / "train", Path(self.options.project))

    def _prepared(self, group: Group, row: Row) -> Result:
        """The data converted once, and the pixels compared."""
        result = Result(row)
        owner = row.data_of or row.peer
        kept = self.folder / group.name / f"{owner}.json"
        into = self.folder / group.name / owner
        photo_folder = self._repeated(group)
        if kept.exists():
            result.data, result.convert_seconds, result.megabytes = json.loads(kept.read_text())
        else:
            shutil.rmtree(into, ignore_errors=True)
            into.parent.mkdir(parents=True, exist_ok=True)
            said = self._child("prepare", owner, self._work(group, photo_folder), into=str(into))
            if (note := self._note(said)) != "":
                return self._refused(result, group, note)
            data = Path(said["data"])
            count = 0 if data == photo_folder else _bytes(into)
            result.data, result.convert_seconds, result.megabytes = str(data), said["seconds"], count / 1e6
            kept.write_text(json.dumps([result.data, result.convert_seconds, result.megabytes]))
        if row.data_of is not None:  # the same pixels
            return result
        said = self._pixels(group, row)
        if (note := self._note(said)) != "":
            return self._refused(result, group, note)
        result.pixels = said["difference"]
        self.console.print(f"{group.name:7s} {row.title}: ready, pixels differ by {result.pixels:.2f} of 255")
        return result

    def _pixels(self, group: Group, row: Row) -> dict[str, Any]:
        """A fixed crop of a few photos: all of them, with sides of a ratio that random crops may have."""
        few, into = self.folder / group.name / "few" / "train", self.folder / group.name / "few.data"
        if not few.is_dir():
            for path, label in files(self._photos(group))[::10][:64]:
                target = few / f"class{label:02d}" / Path(path).name
                target.parent.mkdir(parents=True, exist_ok=True)
                photos.cut_to_ratio(Path(path), target)
        shutil.rmtree(into, ignore_errors=True)
        work = dataclasses.replace(self._work(group, few), batch=32, scale=(1.0, 1.0), flip=0.0)
        return self._child("pixels", row.peer, work, into=str(into))

    def _measure(self, group: Group, result: Result, number: int) -> None:
        work = self._work(group, self._repeated(group)).with_data(Path(result.data))
        said = self._child("speed", result.row.peer, work, seconds=self.options.seconds)
        if (note := self._note(said)) != "":
            self._refused(result, group, note)
            return
        times = min(self.cores, self.options.workers) if result.row.peer == "limit" else 1
        result.speeds.append(said["images_per_second"] * times)
        result.cpu_ms.append(said["cpu_ms"])
        speed = f"{result.speeds[-1]:8,.0f} img/s"
        self.console.print(
            f"round {number + 1}, {group.name:7s}{speed}  {result.cpu_ms[-1]:6.2f} ms  {result.row.title}"
        )

    def _refused(self, result: Result, group: Group, note: str) -> Result:
        result.note = note
        self.console.print(f"{group.name:7s} {result.row.title}: {note}")
        return result

    def _note(self, said: dict[str, Any]) -> str:
        if "missing" in said:
            return "not installed"
        return f"failed: {said['failed']}" if "failed" in said else ""

    def _work(self, group: Group, photo_folder: Path) -> Work:
        return Work(photo_folder, photo_folder, Path(self.options.project), group.kind, self.options.workers)

    def _photos(self, group: Group) -> Path:
        return Path(self.options.photos) / group.photos / "train"

    def _repeated(self, group: Group) -> Path:
        """The photos, each under several names where they are read as files."""
        if group.kind != "folder":
            return self._photos(group)
        folder = self.folder / group.name / "photos" / "train"
        if not folder.is_dir():
            part = folder.with_name(".train.part")
            for path, label in files(self._photos(group)):
                for copy in range(REPEATS[group.photos]):
                    target = part / f"class{label:02d}" / f"{copy}-{Path(path).name}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _link(path, target)
            part.rename(folder)
        return folder

    def _child(self, mode: str, peer: str, work: Work, **more: Any) -> dict[str, Any]:
        """`benchmarks.measure` in a process of its own; its line of JSON, or what it said last."""
        asked = json.dumps({"work": dataclasses.asdict(work), **more}, default=str)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measure", mode, peer, asked],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            output = f"no answer in {PATIENCE:.0f} s"
        finally:
            _end_group(process)
        lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
        for line in reversed(lines):
            if line.startswith("{"):
                said: dict[str, Any] = json.loads(line)
                return said
        if self.options.verbose:
            self.console.print(output)
        return {"failed": lines[-1][:200]}


def _end_group(process: subprocess.Popen[str]) -> None:
    """The child and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _link(source: str, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy(source, target)


def command_of(options: argparse.Namespace) -> str:
    """The command for RESULTS.md: what differs from the defaults, without paths of this machine."""
    default = parser().get_default
    names = ("groups", "peers", "rounds", "seconds", "workers")
    changed = [f"--{name} {value}" for name in names if (value := getattr(options, name)) != default(name)]
    photo_folder = " PHOTOS=..." * (Path(options.photos).resolve() != Path(default("photos")).resolve())
    return f"make bench{photo_folder} WRITE=1" + (f' ARGS="{" ".join(changed)}"' if changed else "")


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="The project beside its peers.")
    parser.add_argument("--photos", default=str(HERE.parent / "build/photos"), help="a folder with small/ and camera/")
    parser.add_argument("--project", default=str(TEMPLATE), help="a baked project; the template folder works as well")
    parser.add_argument("--work", default=str(HERE.parent / "build/bench-data"), help="for converted data; kept")
    parser.add_argument("--groups", default=",".join(group.name for group in GROUPS))
    parser.add_argument("--peers", default="", help="only these, and the project; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"write {HERE / 'RESULTS.md'}")
    parser.add_argument("--verbose", action="store_true", help="all that a failing competitor says")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, emoji=False, width=140)
    began = time.monotonic()
    photos.make(Path(options.photos))
    names = options.groups.split(",")
    groups = [group for group in GROUPS if group.name in names]
    bench = Bench(options, console)
    found = bench.run(groups, [peer for peer in options.peers.split(",") if peer])
    tables = [results.table(group, found[group.name]) for group in groups]
    kinds = sorted({group.photos for group in groups}, reverse=True)
    tables.append(results.steps_table({kind: bench.steps(kind) for kind in kinds}))
    for table in tables:
        console.print(results.shown(table))
    minutes = (time.monotonic() - began) / 60
    console.print(f"{minutes:.0f} minutes")
    if options.write:
        (HERE / "RESULTS.md").write_text(results.page(tables, options, bench.cores, command_of(options), minutes))
        console.print(f"written: {HERE / 'RESULTS.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
