"""tune: real runs as measurements, what a machine can bear, the batch size, stopping, and the whole of it once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import HOME, QUICK, until

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.records import BatchRecord
from fasttrain.tools import batch_size, footprint, project, trials, tune
from fasttrain.tools.batch_size import Sizes
from fasttrain.tools.footprint import Machine
from fasttrain.tools.search import Choice
from fasttrain.tools.trials import Measured, Runs
from fasttrain.transfer import Batch

GB = 10**9
LIMIT = 1500  # seconds, for a machine that does much else; a hang becomes a failure


def record(wait: float = 0.03, ready: int | None = None) -> BatchRecord:
    return BatchRecord(0, 1, 0.0, 0.1 + wait, wait, 0.0, 0.06, 0.02, 0.01, 0.01, 32, ready=ready)


# ---- what records say


def test_step_wait_and_busy_are_shares_of_the_time_between_batches() -> None:
    found = trials.summary([record(0.1)] * 10, world=2)
    assert found.step == pytest.approx(0.2)
    assert found.wait == pytest.approx(0.5)
    assert found.busy == pytest.approx(0.45)
    assert found.images_per_second == pytest.approx(2 * 32 / 0.2)


def test_batches_that_only_used_up_what_lay_ready_do_not_count() -> None:
    """Of twenty batches ten had been made before: the loader makes half of what it seems to."""
    draining = [record(0.0, ready=max(0, 10 - i // 2)) for i in range(20)]
    steady = [record(0.0, ready=4) for _ in range(20)]
    fast = trials.summary(steady, 1).images_per_second
    assert trials.summary(draining, 1).images_per_second == pytest.approx(fast * (1 - 8 / 20), rel=0.1)


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rank0.jsonl"
    new = history.Tail(file)
    assert new() == []
    file.write_text('{"a": 1}\n{"b"')
    assert new() == [{"a": 1}]
    with file.open("a") as opened:
        opened.write(": 2}\n")
    assert (new(), new()) == ([{"b": 2}], [])
    with file.open("ab") as damaged:
        damaged.write(b'{"c": \xff\n[3]\n{"d": 4}\n')
    assert new() == [{"d": 4}]


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("12:00:00 INFO     x\n12:00:01 ERROR    no such file\n12:00:02 INFO     end\n", "no such file"),
        ("error: data.workers=-1: expected 0\nmore\n", "data.workers=-1: expected 0"),
        ("Traceback\nValueError: odd\n", "ValueError: odd"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure_is_its_own_error(tmp_path: Path, printed: str, says: str) -> None:
    (tmp_path / "output.txt").write_text(printed)
    assert trials.reason(tmp_path / "output.txt") == says


def test_the_launcher_that_started_this_is_unknown_to_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert not [name for name in trials.environment() if name.startswith(("RANK", "LOCAL", "MASTER", "TORCHELASTIC"))]
    assert str(HOME) in trials.environment()["PYTHONPATH"]


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ask", [True, False])
def test_no_process_is_left_when_a_run_is_stopped(tmp_path: Path, ask: bool) -> None:
    child = "import subprocess,sys,time; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']); "
    child += "print(p.pid, flush=True); time.sleep(600)"
    output = tmp_path / "output.txt"
    with trials.started([sys.executable, "-c", child], output, ask) as process:
        until(lambda: output.read_text().endswith("\n"))
    assert process.poll() is not None
    grandchild = int(output.read_text())
    until(lambda: not running(grandchild))  # the end of a process that is killed takes a moment


# ---- what a machine can bear


def test_workers_and_prefetch_are_bounded_by_cores_memory_and_shared_memory() -> None:
    start, batch = Choice(0, 4, 2), 5_000_000

    def workers(**changes: Any) -> tuple[int, ...]:
        machine = Machine(**{"cores": 8, "memory": 64 * GB, "shared": None, **changes})
        return footprint.space(start, machine, batch, 1, on_cpu=True).workers

    assert workers() == (0, 1, 2, 3, 4, 6, 8, 12)
    assert workers(cores=2) == (0, 1, 2, 3)
    assert workers(cautious=True) == (0, 1, 2, 3, 4)
    assert workers(memory=1 * GB) == (0, 1, 2)
    assert workers(memory=2 * GB, forks=False) == (0, 1)
    assert workers(shared=300_000_000) == (0, 1, 2, 3)
    few = footprint.space(Choice(8, 4, 2), Machine(8, 2 * GB, None), batch, 1, on_cpu=False)
    assert (few.prefetch, few.threads) == ((4,), (2,))  # the settings now stay in it, whatever they take
    assert footprint.space(start, Machine(8, 64 * GB, None), batch, 4, on_cpu=True).workers == (0, 1, 2, 3)


def test_short_memory_is_caught_and_cleaned_up_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    largest, seen = 100, []

    def step(batch: Batch) -> int:
        seen.append(batch.tensors[0].shape[0])
        if batch.size > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        if batch.size == 7:
            raise RuntimeError("shapes don't match")
        return batch.size

    kept = Batch((torch.arange(8), torch.zeros(8, 3)), [0] * 8, 0, 0, 0, 0, 0.0, None)
    sizes = Sizes(step, kept, torch.device("cpu"), 1)
    monkeypatch.setattr(batch_size, "SECONDS", 0.0)
    assert sizes(64) is not None
    assert seen[-1] == 64
    assert sizes(128) is None
    with pytest.raises(RuntimeError, match="shapes"):
        sizes(7)


def test_a_batch_that_would_not_fit_in_the_hosts_memory_is_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def step(batch: Batch) -> int:
        tried.append(batch.size)
        return batch.size

    kept = Batch((torch.zeros(8),), [0] * 8, 0, 0, 0, 0, 0.0, None)
    sizes = Sizes(step, kept, torch.device("cpu"), 2)
    monkeypatch.setattr(batch_size, "SECONDS", 0.0)
    monkeypatch.setattr(batch_size, "most_used", lambda: sizes.before + GB)
    monkeypatch.setattr("fasttrain.host.memory", lambda: (0, 10 * GB))  # 70 % of it, for two processes: 3.5 GB
    assert sizes(32) is not None
    assert sizes(64) is not None  # 2.5 GB are foretold
    assert sizes(256) is None  # 5 GB
    assert max(tried) == 64


# ---- the command


MEASURED = Measured(100.0, 0.1, 0.5, 0.4, 20, 2.0)


@pytest.fixture
def own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """config.yaml in a folder of its own."""
    shutil.copy(HOME / "config.yaml", tmp_path)
    monkeypatch.setattr(project, "HOME", tmp_path)
    return tmp_path


def outcome_of(changes: dict[str, Any]) -> tune.Outcome:
    return tune.Outcome([MEASURED] * 3, [MEASURED] * 3, changes, dict.fromkeys(changes))


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_accepted_changes_are_written_or_with_dry_run_shown(
    own_project: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (own_project / "config.yaml").read_text()
    monkeypatch.setattr(tune, "tune", lambda *_: outcome_of({"data.workers": 7}))
    assert tune.main(arguments) == 0
    after, shown = (own_project / "config.yaml").read_text(), capsys.readouterr().out
    assert [line.split("#")[0].strip() for line in after.splitlines() if line not in before.splitlines()] == (
        [] if arguments else ["workers: 7"]
    )
    assert ("+  workers: 7" in shown) == bool(arguments)
    assert "waiting for data" in shown
    assert sorted(path.name for path in own_project.iterdir()) == ["config.yaml"]


def test_without_a_proven_gain_nothing_is_written(own_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (own_project / "config.yaml").stat()
    monkeypatch.setattr(tune, "tune", lambda *_: outcome_of({}))
    assert tune.main([]) == 0
    assert (own_project / "config.yaml").stat() == before


def test_ctrl_c_leaves_the_settings_and_the_folder_as_they_were(
    own_project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (own_project / "config.yaml").read_bytes()

    def interrupted(overrides: Any, folder: Path, *_: Any) -> None:
        (folder / "run1").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.main([])
    assert "config.yaml is as it was" in capsys.readouterr().out
    assert (own_project / "config.yaml").read_bytes() == before
    assert sorted(path.name for path in own_project.iterdir()) == ["config.yaml"]


def test_sigterm_ends_it_as_ctrl_c_does() -> None:
    with pytest.raises(SystemExit) as stopped:
        tune.terminate(signal.SIGTERM, None)
    assert stopped.value.code == 143


def test_only_rank_0_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(tune, "tune", lambda *_: pytest.fail("rank 1 must not measure"))
    assert tune.main([]) == 0


def test_settings_that_fail_are_told_in_the_words_of_the_run(images: Path, tmp_path: Path) -> None:
    runs = Runs([*QUICK, f"data.path={images}", "model.name=resnet19"], tmp_path, 0.1)
    with pytest.raises(UserError, match=r"model\.name=resnet19: expected"):
        runs.measure()


SLOW = """
import time

_original = Images.original


def _slow(self: Images, index: int) -> tuple[images.Picture, int]:
    time.sleep(0.01)
    return _original(self, index)


Images.original = _slow
"""


SHORT = "\nPAIRS, ROUNDS = 1, 0\n"  # each run costs its start


def test_a_loader_that_sleeps_gets_workers_and_the_file_changes_in_that_line(
    changed_project: Callable[[str, str], Path], images: Path
) -> None:
    """The whole of it, in real runs. A sample costs time here and no core, so load doesn't change the result."""
    home = changed_project("data.py", SLOW)
    with (home / "fasttrain/tools/search.py").open("a") as file:
        file.write(SHORT)
    before = (home / "config.yaml").read_text().splitlines()
    settings = ["model.name=stand_in", "model.stand_in_ms=20", "data.batch_size=16", "data.image_size=24"]
    command = [sys.executable, "-m", "fasttrain", "tune", "--seconds", "0.5", *settings, f"data.path={images}"]
    done = subprocess.run(
        [*command, "data.workers=0"],
        cwd=home,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted" in done.stdout, done.stdout
    after = (home / "config.yaml").read_text().splitlines()
    changed = {new.split(":")[0].strip() for old, new in zip(before, after, strict=True) if old != new}
    assert "workers" in changed <= {"workers", "prefetch_factor", "threads"}, done.stdout
    assert not (home / "runs").exists()


def test_under_torchrun_all_ranks_are_measured(changed_project: Callable[[str, str], Path], images: Path) -> None:
    """A device that takes longer than any loading: there is nothing to gain, and the file stays."""
    home = changed_project("fasttrain/tools/search.py", SHORT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fasttrain"]
    settings = [*QUICK, "model.name=stand_in", "model.stand_in_ms=100", f"data.path={images}", "data.workers=1"]
    before = (home / "config.yaml").read_bytes()
    done = subprocess.run(
        [sys.executable, *launcher, "tune", "--dry-run", "--seconds", "0.4", *settings],
        cwd=home,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes" in done.stdout
    assert "img/s" in done.stdout
    assert "config.yaml is as it was" in done.stdout  # said where nothing is gained, and of a dry run
    assert (home / "config.yaml").read_bytes() == before


def test_the_plan_reaches_the_sweep_as_it_is_and_its_failure_is_told(images: Path, tmp_path: Path) -> None:
    rows = tune._rows([*QUICK, f"data.path={images}", "model.name=nothing"], tmp_path / "sweep", 1, {"seconds": 0.1})
    with pytest.raises(UserError, match=r"model\.name=nothing"):
        list(rows)
    assert json.loads((tmp_path / "sweep/plan.json").read_text())["seconds"] == 0.1
