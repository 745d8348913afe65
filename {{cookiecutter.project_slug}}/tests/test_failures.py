"""What fails ends on all ranks, soon, with its first cause said once; nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import until
from faults import CASES, Case, attempt, check
from torch.utils.data import DataLoader, Dataset

from fasttrain import failures, inject
from fasttrain.errors import UserError
from fasttrain.failures import Cause, EndedByOther, Failures, Lost, lost_others, summary

# Each takes the time of a training; `make faults` tries all.
TRIED = (
    "raise, data, rank 0",
    "raise, loader worker, rank 1",
    "raise, saved",
    "kill, validation, rank 1",
    "stop, forward, rank 1",
    "hang, forward, rank 0",
    "worker hangs, rank 1",
    "launcher killed",
    "data folder lost",
    "save takes 5 s",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in TRIED], ids=lambda case: case.name)
def test_a_fault_in_two_processes(case: Case, images: Path, tmp_path: Path) -> None:
    outcome = attempt(case, images, tmp_path)
    assert not check(case, outcome), outcome.output


def test_the_cases_that_are_tried_exist() -> None:
    assert set(TRIED) <= {case.name for case in CASES}


# ---- who failed first ------------------------------------------------------------------------------------------------

CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:4")


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Failures, Failures]:
    """Two ranks with one store."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *args, **options: None)
    monkeypatch.setattr(failures, "PATIENCE", 0.2)
    stores: Any = dist  # which exports it, unknown to type checkers
    store = stores.HashStore()
    ranks = Failures(0, 2, 5.0), Failures(1, 2, 5.0)
    for rank in ranks:
        rank.share(store)
    return ranks


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_cause_is_said_by_its_rank_and_repeated_by_the_others(pair: tuple[Failures, Failures]) -> None:
    pair[1].place = lambda: "epoch 2, step 9"
    assert pair[1].explain(raised(ValueError("wrong"))) is None
    other = pair[0].explain(CLOSED)
    assert isinstance(other, EndedByOther)
    assert str(other).startswith("rank 1 failed first: epoch 2, step 9: ValueError: wrong (test_failures.py:")
    assert other.only == "file"


def test_a_later_error_of_its_own_is_not_the_first_cause(pair: tuple[Failures, Failures]) -> None:
    assert pair[0].explain(UserError("first")) is None
    assert str(pair[1].explain(UserError("second"))) == "rank 0 failed first: first"


def test_only_a_process_that_failed_is_ended_after_a_while(
    pair: tuple[Failures, Failures], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a signal asked to end, and whose workers are slow to, ends with the signal's code."""
    armed: list[float] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, **options: armed.append(seconds))
    pair[0].explain(SystemExit(143), asked=True)
    assert armed == []
    pair[0].explain(UserError("wrong"))
    assert armed == [failures.TO_END]


def test_of_two_that_fail_at_once_one_is_the_first(pair: tuple[Failures, Failures]) -> None:
    first = Cause(0, "a")
    assert pair[0]._claim(first) == first
    assert pair[1]._claim(Cause(1, "b")) == first


def test_a_stop_is_no_failure_unless_there_was_one(pair: tuple[Failures, Failures]) -> None:
    assert pair[0].explain(SystemExit(143), asked=True) is None
    assert pair[0].known() is None
    pair[1].explain(UserError("first"))
    assert str(pair[0].explain(SystemExit(143), asked=True)) == "rank 1 failed first: first"


def test_a_killed_process_is_named_aloud(pair: tuple[Failures, Failures]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    pair[1]._store.set("process 1", pair[1]._store.get("process 1").decode().rsplit(",", 1)[0] + f", {gone.pid}]")
    gone.kill()
    until(lambda: Path(f"/proc/{gone.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    other = pair[0].explain(CLOSED)
    gone.wait()
    assert isinstance(other, EndedByOther)
    assert f"rank 1 failed first: its process {gone.pid} was killed" in str(other)
    assert other.only is None


def test_a_rank_that_does_not_answer_is_named_with_the_setting(pair: tuple[Failures, Failures]) -> None:
    other = pair[0].explain(RuntimeError("[third_party/gloo/x.cc:78] Timed out waiting 5000ms for recv operation"))
    assert "rank 1 failed first: no answer from process" in str(other)
    assert "within 5 s (run.timeout)" in str(other)


def test_what_breaks_after_the_launcher_is_gone_follows_from_that(pair: tuple[Failures, Failures]) -> None:
    pair[0].launcher_is_gone("the launcher is gone")
    assert str(pair[0].explain(CLOSED)) == "the launcher is gone"


def test_only_errors_of_connections_count_as_those_of_others() -> None:
    assert lost_others(CLOSED) is Lost.CONNECTION
    wrapped = RuntimeError("in backward")
    wrapped.__cause__ = CLOSED
    assert lost_others(wrapped) is Lost.CONNECTION
    assert lost_others(RuntimeError("CUDA out of memory")) is None
    assert lost_others(UserError("Connection closed by peer")) is None


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "


@pytest.mark.parametrize(
    ("said", "lost"),
    [
        ("remote process exited or there was a network error\nncclRemoteError: A call failed", Lost.CONNECTION),
        ("internal error\nLast error:\nNet : Connection closed by remote peer a<50260>", Lost.CONNECTION),
        ("NCCL communicator was aborted on rank 0.", Lost.CONNECTION),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", Lost.ANSWER),
        ("unhandled cuda error\nncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'", None),
        ("invalid usage\nncclInvalidUsage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0", None),
    ],
)
def test_nccls_errors_of_this_process_are_its_own(
    pair: tuple[Failures, Failures], logged: list[str], said: str, lost: Lost | None
) -> None:
    """Whatever class PyTorch raises them as; none of their lines is lost."""
    last = said.splitlines()[-1]
    for kind in (dist.DistBackendError, RuntimeError):
        assert lost_others(kind(NCCL + said)) is lost
    if lost is None:
        assert pair[0].explain(raised(dist.DistBackendError(f"{NCCL}{said}\nException raised from x:1"))) is None
        assert last in str(pair[1].explain(CLOSED))
        assert "Exception raised" not in str(pair[1].known())
    else:
        pair[0].explain(raised(dist.DistBackendError(NCCL + said)))
        assert last in "".join(logged)


def test_a_rank_that_runs_and_has_not_noticed_yet_is_not_named(pair: tuple[Failures, Failures]) -> None:
    assert str(pair[0].explain(CLOSED)).startswith("rank 0 failed first: lost the connection to the others ([/pytorch")


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise KeyError("label")


def test_an_error_in_a_loader_worker_is_one_line_with_its_place() -> None:
    with pytest.raises(KeyError) as caught:
        next(iter(DataLoader(Failing(), num_workers=1)))
    text = summary(caught.value)
    assert "\n" not in text
    assert "'label'" in text
    assert "in loader worker 0 (test_failures.py:" in text


# ---- the injector ----------------------------------------------------------------------------------------------------


def test_a_fault_happens_once_at_its_place(tmp_path: Path) -> None:
    fault = inject.Fault.parse(f"raise@rank=1,step=3,phase=backward,once={tmp_path / 'mark'}")
    assert not fault.is_due(0, 3, "backward")
    assert not fault.is_due(1, 2, "backward")
    assert not fault.is_due(1, 3, "forward")
    assert fault.is_due(1, 3, "backward")
    assert not fault.is_due(1, 3, "backward")
    again = inject.Fault.parse(f"raise@rank=1,step=3,phase=backward,once={tmp_path / 'mark'}")
    assert not again.is_due(1, 3, "backward"), "after a restart"


def test_without_the_variable_the_injector_is_not_imported() -> None:
    code = "import sys, train; sys.exit('fasttrain.inject' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False, timeout=100)
    assert done.returncode == 0
