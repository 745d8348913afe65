"""Stopped by a signal or a kill at any place, a training goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from conftest import HOME, QUICK, TIME_LIMIT, Finished, Train, copy_project

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0")
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
# Three epochs of 11 steps of 6 images. A little time for each step, so that signals find a training under way.
SETTINGS = (*QUICK, "run.threads=1", "amp=off", "train.epochs=3", "checkpoint.every_steps=2", "data.batch_size=3")
SLOW = """
import time

fast_loss = compute_loss

def compute_loss(*args):
    time.sleep(float(__import__("os").environ.get("STEP_TAKES", "0")))
    return fast_loss(*args)
"""


def equal(one: Finished, other: Finished) -> None:
    """The last bit of all weights."""
    first, second = (each.checkpoint()["model"] for each in (one, other))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def slow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project whose steps take as long as STEP_TAKES says."""
    home = copy_project(tmp_path_factory.mktemp("slow"))
    with (home / "model.py").open("a") as file:
        file.write(SLOW)
    return home


@pytest.fixture(scope="module")
def start(images: Path, slow_home: Path) -> Callable[..., Any]:
    """`with start(directory, "key=value", launcher=TORCHRUN, step=0.2) as process`: a training under way."""

    @contextmanager
    def started(
        directory: Path, *settings: str, launcher: tuple[str, ...] = (), step: float = 0, home: Path = slow_home
    ) -> Iterator[subprocess.Popen[str]]:
        arguments = [str(home / "train.py"), *SETTINGS, f"data.path={images}", f"run.dir={directory}", "resume=auto"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "STEP_TAKES": str(step)}
        with subprocess.Popen(
            [sys.executable, *launcher, *arguments, *settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                        child.kill()

    return started


def finished(process: subprocess.Popen[str], directory: Path) -> Finished:
    output, _ = process.communicate(timeout=TIME_LIMIT)
    return Finished(process.returncode, output, directory)


def ranks_of(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """The training processes that torchrun started, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        environment = child.environ()
        if child.ppid() == process.pid and "RANK" in environment:
            found[environment["RANK"]] = child
    return found


@pytest.fixture(scope="module")
def whole(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two processes, never interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    with start(directory, launcher=TORCHRUN) as process:
        done = finished(process, directory)
    assert done.code == 0, done.output
    return done


def test_stopped_by_signals_two_processes_end_at_one_step_and_go_on_as_if_nothing_had_been(
    start: Callable[..., Any], whole: Finished, tmp_path: Path
) -> None:
    """First SIGTERM to rank 1 alone, then SIGUSR1 to the launcher; no checkpoint would be due there."""
    directory = tmp_path / "run"
    steps: list[int] = []
    for launcher, number in ((TORCHRUN, signal.SIGTERM), ((*TORCHRUN, SIGNALS), signal.SIGUSR1)):
        with start(directory, "checkpoint.every_steps=1000", launcher=launcher, step=0.1) as process:
            until = time.monotonic() + TIME_LIMIT
            while len(lines(directory / "rank1.jsonl")) < 3 + max(steps, default=0):
                assert time.monotonic() < until, "no step is done"
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            if number == signal.SIGTERM:
                ranks_of(process)["1"].send_signal(number)
            else:
                process.send_signal(number)
            stopped = finished(process, directory)
        assert stopped.code != 0
        name = signal.Signals(number).name
        assert f"stopped by {name}; go on with run.dir={directory} resume=auto" in stopped.output, stopped.output
        assert f"stopped by {name}" in (directory / "rank1.log").read_text()
        assert f"stopped by {name}" in (directory / "preempted").read_text()
        assert "Traceback" not in (directory / "rank0.log").read_text() + (directory / "rank1.log").read_text()
        steps.append(stopped.checkpoint()["state"]["step"])
        assert [len(lines(directory / f"rank{rank}.jsonl")) for rank in (0, 1)] == [steps[-1]] * 2
    assert 0 < steps[0] < steps[1] < 33
    with start(directory, launcher=TORCHRUN) as process:
        rest = finished(process, directory)
    assert rest.code == 0, rest.output
    assert not (directory / "preempted").exists()
    equal(whole, rest)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


KILLED_ONCE = """
import os, signal
from pathlib import Path

kind_loss, calls = compute_loss, 0

def compute_loss(*args):
    global calls
    calls += 1
    flag = Path(os.environ["KILLED"])
    if os.environ.get("RANK") == "1" and calls == 15 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return kind_loss(*args)
"""


def test_torchrun_starts_a_killed_rank_again_and_nothing_is_lost(
    start: Callable[..., Any],
    whole: Finished,
    tmp_path: Path,
    changed_project: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, directory = changed_project("model.py", KILLED_ONCE), tmp_path / "run"
    monkeypatch.setenv("KILLED", str(tmp_path / "flag"))
    launcher = (*TORCHRUN[:-1], "--max-restarts=1")
    with start(directory, launcher=launcher, home=home) as process:
        done = finished(process, directory)
    assert done.code == 0, done.output
    assert (tmp_path / "flag").exists()
    assert "resumed from" in done.output
    equal(whole, done)


def test_a_step_that_never_ends_is_not_waited_for(start: Callable[..., Any], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with start(directory, "checkpoint.stop_seconds=1", "data.workers=1", step=1000) as process:
        until = time.monotonic() + TIME_LIMIT
        while "gauges" not in "".join(lines(directory / "events0.jsonl")):
            assert time.monotonic() < until, "the training does not begin"
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        done = finished(process, directory)
    assert done.code == 143, done.output
    assert "not ended 1 s after the signal (checkpoint.stop_seconds)" in done.output
    assert "not ended" in (directory / "rank0.log").read_text()
    assert "too late to save: no last.pt yet" in (directory / "preempted").read_text()
    assert children
    assert psutil.wait_procs(children, timeout=10)[1] == []


LOGS_SAMPLES = """
class Logged(Images):
    def __getitem__(self, index):  # the sample that each start looks at first
        image, label = super().unfinished(index)
        return images.finished(image), label

    def unfinished(self, index):
        if self.train:
            with open(__import__("os").environ["SEEN"], "a") as file:
                file.write(f"{index}\\n")
        return super().unfinished(index)

Images = Logged
"""


def test_resumed_with_another_number_of_processes_each_sample_comes_once(
    train: Train, tmp_path: Path, changed_project: Callable[[str, str], Path]
) -> None:
    """One process, two, one again, with the same global batch of 6: 64 samples an epoch."""
    home, seen = changed_project("data.py", LOGS_SAMPLES), tmp_path / "seen"
    plain = ("run.threads=1", "model.name=stand_in", "model.stand_in_ms=0", "amp=off", "train.epochs=2", "resume=auto")
    for processes, steps in ((1, 4), (2, 15), (1, 22)):
        settings = (*plain, f"data.batch_size={6 // processes}", f"train.max_steps={steps}")
        run = train("run", *settings, processes=processes, home=home, SEEN=str(seen))
        assert run.code == 0, run.output
        assert run.checkpoint()["state"]["step"] == steps
    samples = [int(line) for line in lines(seen)]
    assert len(samples) == 128
    for epoch in (samples[:64], samples[64:]):  # without workers nothing is read ahead
        assert sorted(epoch) == list(range(64))


# Stands for torchrun, srun and scontrol: leaves the marker where it is to have been preempted, writes what was asked.
STAND_IN = """#!/bin/sh
case "$0" in
    *scontrol) [ "$1" = show ] && echo node1 || echo "$*" >> "$ASKED" ;;
    *) [ "$OUTCOME" = preempted ] && touch "$run/preempted"
       [ "$OUTCOME" = good ] ;;
esac
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which the launchers are stand-ins."""
    for name in ("torchrun", "srun", "scontrol"):
        path = tmp_path / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}


OUTCOMES = pytest.mark.parametrize(("outcome", "again"), [("good", False), ("bad", False), ("preempted", True)])


@OUTCOMES
def test_under_slurm_what_was_preempted_is_queued_again(
    tmp_path: Path, stand_ins: dict[str, str], outcome: str, again: bool
) -> None:
    run = tmp_path / "runs" / "slurm-7"
    run.mkdir(parents=True)
    (run / "preempted").touch()  # of the time before
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1"}
    environment = {**stand_ins, **slurm, "SLURM_CPUS_PER_TASK": "1", "OUTCOME": outcome, "run": str(run)}
    done = subprocess.run(["bash", HOME / "launch" / "slurm.sbatch"], env=environment, check=False)
    assert (done.returncode == 0) == (outcome == "good")
    assert lines(tmp_path / "asked") == ["requeue 7"] * again


@OUTCOMES
def test_on_kubernetes_what_was_preempted_has_an_exit_code_of_its_own(
    tmp_path: Path, stand_ins: dict[str, str], outcome: str, again: bool
) -> None:
    job = list(yaml.safe_load_all((HOME / "launch" / "kubernetes.yaml").read_text()))[1]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    command = [part.replace("/data/runs/first", str(tmp_path)) for part in command]
    (tmp_path / "preempted").touch()  # of the time before
    done = subprocess.run(command, env={**stand_ins, "OUTCOME": outcome, "run": str(tmp_path)}, check=False)
    assert done.returncode == {"good": 0, "bad": 1, "preempted": 75}[outcome]
    ignored = [
        value for rule in job["podFailurePolicy"]["rules"] for value in rule.get("onExitCodes", {}).get("values", [])
    ]
    assert (done.returncode in ignored) == again
