"""A run directory: whose it is, what is written down in it, and how a start takes it over."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain import device, facts, lock, rundir
from fasttrain import run as running
from fasttrain.errors import SettingsError, UserError
from fasttrain.stop import Stopped

HOLD = """
import sys
from pathlib import Path
from fasttrain import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def claim(folder: Path, resume: str | None = "auto", began: float = 7.0) -> tuple[str, str | None, float, str, str]:
    with ExitStack() as stack:
        return rundir.claim(str(folder), resume, began, folder, stack)


def write(path: Path, run_id: str, started: float) -> None:
    facts.write(path, run_id, path.parent, torch.device("cpu"), 1, started, started)


def test_a_run_that_ended_before_its_first_checkpoint_is_the_same_run_when_it_starts_again(tmp_path: Path) -> None:
    *_, started, first, _ = claim(tmp_path)
    assert started == 7.0
    write(tmp_path / facts.FILE, first, started)
    _, saved, started, again, token = claim(tmp_path, began=99.0)
    assert (saved, started, again) == (None, 7.0, first)
    assert token != first, "another each start"


def test_without_resume_a_run_is_not_started_again(tmp_path: Path) -> None:
    write(tmp_path / facts.FILE, "one", 1.0)
    with pytest.raises(SettingsError, match="holds a run already"):
        claim(tmp_path, None)


def test_a_folder_that_can_not_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(SettingsError, match=r"run.dir=.*expected a folder that can be written \(Read-only file system"):
        claim(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"started": null}'])
def test_a_run_json_lost_in_a_power_cut_does_not_keep_a_whole_checkpoint_from_going_on(
    tmp_path: Path, text: str, logged: list[str]
) -> None:
    (tmp_path / facts.FILE).write_text(text)
    torch.save({"state": {"run_id": "the run"}}, tmp_path / "last.pt")
    _, saved, started, name, _ = claim(tmp_path)
    assert (saved, started, name) == (str(tmp_path / "last.pt"), 7.0, "the run")
    assert any("run.json: not readable" in line for line in logged)
    write(tmp_path / facts.FILE, name, started)
    assert json.loads((tmp_path / facts.FILE).read_text())["id"] == "the run"


def test_a_later_start_is_added_to_the_facts_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / facts.FILE
    for started in (1.0, 2.0, 3.0):
        write(path, "one", started)
    content = json.loads(path.read_text())
    assert (content["started"], [each["started"] for each in content["resumed"]]) == (1.0, [2.0, 3.0])
    assert os.listdir(tmp_path) == [facts.FILE]


def test_a_full_disk_is_said_and_what_stood_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "config.yaml"
    facts.put(path, "before")
    monkeypatch.setattr(os, "fsync", full)
    facts.put(path, "after")
    assert path.read_text() == "before"
    assert logged == [f"{path}: can't be written (No space left on device)\n"]


# ---- one training a run directory ------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that trains in tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    where = Path(lock.__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=where) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_training_in_a_run_directory_is_refused_and_the_first_one_named(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WAIT", 0.0)
    (tmp_path / ".last.pt.1.tmp").touch()  # its save
    with pytest.raises(
        UserError, match=rf"^run\.dir=.*another training is under way .*process {other.pid} on "
    ) as error:
        claim(tmp_path)
    assert "\n" not in str(error.value)


def test_the_end_of_the_first_however_it_comes_is_waited_for(
    other: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.lock.time.sleep", lambda seconds: other.kill())  # seen once to be held
    with lock.held(tmp_path):
        assert other.wait() != 0
        assert (tmp_path / lock.FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, kind: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with lock.held(tmp_path):
        pass
    with lock.held(tmp_path / "gone"):
        pass


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, False),  # torchrun's own
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, True),
    ],
)
def test_a_number_of_threads_that_somebody_chose_is_left(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], chosen: bool
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert device._chosen_threads() is chosen


def test_a_signal_before_the_run_directory_is_taken_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # SIGTERM would stay ignored
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").touch()  # somebody else's: the folder one stands in is not the run's
    with pytest.raises(Stopped), running._first_cause(running.Run(0, 0, 1, 1, torch.device("cpu"))):
        raise Stopped(signal.SIGTERM)
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    assert any("stopped by SIGTERM; before the run directory was taken" in line for line in logged)
