"""Faults on purpose in real trainings of two processes, and what must be true after each.

python tests/faults.py            try all of them (about ten minutes) and print the table
python tests/faults.py kill stop  only those whose name contains one of the words
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

HOME = Path(__file__).resolve().parents[1]
LIMIT = 60.0  # seconds from the fault to the end of the last process
START = 120.0  # seconds that a busy machine may need to get to the fault
SETTINGS = (
    "data.image_size=24",
    "data.batch_size=6",
    "data.workers=1",
    "train.epochs=3",
    "optimizer.lr=0.02",
    "optimizer.warmup_steps=2",
    "run.timeout=8",
)
ENDLESS = ("train.epochs=100000",)


@dataclass(frozen=True)
class Case:
    """A fault, and the words that name it. Step 8 lies in the second of three epochs of six steps."""

    name: str
    fault: str
    says: str
    settings: tuple[str, ...] = ()
    dead: int | None = None  # rank that can't write a last line
    survives: bool = False


def _cases() -> list[Case]:
    cases = []
    for rank in (0, 1):
        for phase in ("data", "forward", "backward", "optimizer", "validation"):
            at = f"@rank={rank},step=8,phase={phase}"
            words = f"planted at rank {rank}, step 8, {phase}"
            cases.append(Case(f"raise, {phase}, rank {rank}", f"raise{at}", words))
            cases.append(Case(f"kill, {phase}, rank {rank}", f"kill{at}", f"rank {rank} failed first", dead=rank))
        for phase in ("forward", "validation"):
            at = f"@rank={rank},step=8,phase={phase}"
            lost = f"rank {rank} failed first"
            cases.append(Case(f"sys.exit, {phase}, rank {rank}", f"exit{at}", "sys.exit(3) was called"))
            cases.append(Case(f"vanish, {phase}, rank {rank}", f"vanish{at}", "ended with exit code 3", dead=rank))
            cases.append(Case(f"stop, {phase}, rank {rank}", f"stop{at}", "was stopped", dead=rank))
            cases.append(Case(f"hang, {phase}, rank {rank}", f"hang{at}", lost, dead=rank))
        sample = f"raise@rank={rank},step=8,phase=sample"
        cases.append(Case(f"raise, loader worker, rank {rank}", sample, f"planted at rank {rank}, step 8, sample"))
        cases.append(Case(f"user's error, forward, rank {rank}", f"user@rank={rank},step=8", "planted by the user"))
        cases.append(Case(f"worker killed, rank {rank}", f"worker@rank={rank},step=8", "loader worker (process"))
        cases.append(Case(f"worker hangs, rank {rank}", f"hang@rank={rank},step=8,phase=sample", "no batch came"))
        cases.append(Case(f"NaN, rank {rank}", f"nan@rank={rank},step=8", f"the loss is nan on rank {rank}"))
    for phase in ("save", "writing", "saved"):
        at = f"@rank=0,step=12,phase={phase}"
        cases.append(Case(f"kill, {phase}", f"kill{at}", "rank 0 failed first", dead=0))
        if phase != "writing":
            cases.append(Case(f"raise, {phase}", f"raise{at}", f"planted at rank 0, step 12, {phase}"))
    cases.append(Case("saver killed", "saver@step=12,phase=writing", "best accuracy", survives=True))
    cases.append(Case("launcher killed", "launcher@rank=1,step=8", "is gone, so the training ends", ENDLESS))
    cases.append(Case("data folder lost", "lose@rank=0,step=8,path={data}/train", "train/"))
    cases.append(Case("save takes 5 s", "slow@rank=0,step=12,phase=save,seconds=5", "best accuracy", survives=True))
    cases.append(Case("early stop", "slow@seconds=0", "stopped early", ("train.early_stop=1",), survives=True))
    return cases


CASES = _cases()


@dataclass
class Outcome:
    """How a job with a fault ended."""

    code: int
    seconds: float  # from the fault to the end of the last process
    output: str
    dir: Path

    def line(self, words: str) -> str:
        """The last line on the console, or else in a log, that says it."""
        logs = [path.read_text() for path in sorted(self.dir.glob("rank*.log"))]
        lines = [line for text in (*logs, self.output) for line in text.splitlines() if words in line]
        return lines[-1].strip().removeprefix("traceback : ") if lines else "-"


def attempt(case: Case, images: Path, folder: Path) -> Outcome:
    """Train with this fault, in two processes, until none of them is left.

    Raises:
        TimeoutError: some are, after the time limit; they are killed.
    """
    data, run, mark, said = folder / "data", folder / "run", folder / "mark", folder / "output"
    shutil.copytree(images, data)
    fault = f"{case.fault.format(data=data)}{',' if '@' in case.fault else '@'}once={mark}"
    settings = [*SETTINGS, *case.settings, f"data.path={data}", f"run.dir={run}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FASTTRAIN_FAULT": fault}
    with said.open("w") as output:
        job = subprocess.Popen(
            [*command, str(HOME / "train.py"), *settings],
            cwd=folder,
            env={**os.environ, **changed},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    began = time.time()
    while job.poll() is None or processes_of(run):
        now = time.time()
        if now > began + START + LIMIT or (mark.exists() and now > mark.stat().st_mtime + LIMIT + 30):
            left = processes_of(run)
            for process in left:
                process.kill()
            job.kill()
            job.wait()
            raise TimeoutError(f"{case.name}: {len(left)} processes were left\n{said.read_text()}")
        time.sleep(0.05)
    since = mark.stat().st_mtime if mark.exists() else began
    return Outcome(job.returncode, time.time() - since, said.read_text(), run)


def processes_of(run: Path) -> list[psutil.Process]:
    """All processes, loader workers too, that were started for this run directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"run.dir={run}" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # gone meanwhile
            continue
    return found


def check(case: Case, outcome: Outcome) -> list[str]:
    """What is not as it must be."""
    wrong = []
    if (outcome.code == 0) != case.survives:
        wrong.append(f"exit code {outcome.code}")
    if outcome.seconds > LIMIT and not case.survives:
        wrong.append(f"{outcome.seconds:.0f} s")
    for rank in {0, 1} - {case.dead}:
        if case.says not in (outcome.dir / f"rank{rank}.log").read_text():
            wrong.append(f"rank {rank} does not say {case.says!r}")
    if not case.survives:
        loud = [line for line in outcome.output.splitlines() if "CRITICAL" in line or "ERROR" in line]
        said = sum(case.says in line for line in loud)
        if said != 1:
            wrong.append(f"said {said} times on the console")
        root = outcome.output.rpartition("Root Cause")[2]
        if case.name != "launcher killed" and case.says not in root:
            wrong.append("not at the end of the console")
    for name in ("best.pt", "last.pt"):
        try:
            if not torch.load(outcome.dir / name, weights_only=True)["model"]:
                wrong.append(f"{name} is empty")
        except (OSError, RuntimeError, KeyError) as error:
            wrong.append(f"{name}: {error}")
    return wrong


def main(words: list[str]) -> int:
    """Try the cases whose names contain one of the words; print the table."""
    from fasttrain import shapes

    bad = 0
    print("| fault | s to end | exit code | the line that the user sees |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        images = Path(name) / "images"
        shapes.draw(images, seed=1, train_per_class=8, val_per_class=1)
        for number, case in enumerate(CASES):
            if words and not any(word in case.name for word in words):
                continue
            folder = Path(name) / str(number)
            folder.mkdir()
            try:
                outcome = attempt(case, images, folder)
                wrong, seconds, code = check(case, outcome), f"{outcome.seconds:.1f}", str(outcome.code)
                line = outcome.line(case.says)
            except TimeoutError as error:
                wrong, seconds, code, line = [str(error)], "never", "-", "-"
            print(f"| {case.name} | {seconds} | {code} | {line} |", flush=True)
            for each in wrong:
                print(f"WRONG: {each}", flush=True)
            bad += bool(wrong)
            shutil.rmtree(folder)
    print(f"{bad} wrong", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HOME))
    sys.exit(main(sys.argv[1:]))
