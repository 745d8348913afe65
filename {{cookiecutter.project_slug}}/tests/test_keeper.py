"""When checkpoints are written, what a failed save costs, and how a run goes on from one."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain import checkpoint, host
from fasttrain.clock import HostClock
from fasttrain.errors import UserError
from fasttrain.keeper import Keeper
from fasttrain.run import Run
from fasttrain.state import State
from fasttrain.update import Schedule, Update
from fasttrain.watch import Watch

Make = Callable[..., Keeper]


class Events:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def batch(self, record: Any) -> None: ...

    def event(self, kind: str, /, **fields: Any) -> None:
        self.seen.append({"event": kind, **fields})


def watch(events: Events | None = None) -> Watch:
    return Watch(events or Events(), HostClock(), 0.0, 0.0)


def network(classes: int = 3) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make(model, state, resume=path, every_steps=3, classes=[...])`: a keeper for tmp_path; ended after the test."""
    runs: list[Run] = []

    def build(
        model: nn.Module | None = None,
        state: State | None = None,
        resume: Path | None = None,
        directory: Path = tmp_path,
        **more: Any,
    ) -> Keeper:
        run = Run(0, 0, 1, 1, torch.device("cpu"), dir=directory, resume=resume, id="this run")
        runs.append(run)
        model = network() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        update = Update(model, optimizer, Schedule(0.1, 10, 0, 0), torch.device("cpu"), dtype=None)
        update.stepped = True
        facts = {"classes": ["a", "b", "c"], "training_samples": 10, "optimizer": "sgd", "effective_batch": 8}
        facts = {**facts, "training_data": "abc", "settings": {"seed": 0}}
        facts.update({name: more.pop(name) for name in list(more) if name in facts})
        settings = {"every_minutes": 1e9, "every_steps": None, "stop_seconds": 20, "metric": "accuracy", "mode": "max"}
        settings.update(more)
        return Keeper(run, State() if state is None else state, model, update, facts, SimpleNamespace(**settings))

    yield build
    for run in runs:
        run.stack.close()


def wait(one: Keeper) -> None:
    assert one.writer is not None
    one.writer.wait()


def save_epoch(one: Keeper, accuracy: float = 0.5, improved: bool = False, events: Events | None = None) -> None:
    one.save_epoch(watch(events), {"accuracy": accuracy}, improved)
    wait(one)


def saver_of(one: Keeper) -> int:
    """The saver's process number."""
    assert one.writer is not None
    assert one.writer._saver is not None
    assert one.writer._saver.process is not None
    return one.writer._saver.process.pid


@contextmanager
def held(one: Keeper) -> Iterator[None]:
    """The saver does not get on; after a while it does, so that who waits for it fails instead of hanging."""
    process = saver_of(one)
    later = threading.Timer(15, os.kill, (process, signal.SIGCONT))
    os.kill(process, signal.SIGSTOP)
    later.start()
    try:
        yield
    finally:
        later.cancel()
        os.kill(process, signal.SIGCONT)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def train_one_step(one: Keeper) -> None:
    one.model(torch.randn(2, 3, 3, 3)).sum().backward()
    one.optimizer.step()
    one.optimizer.zero_grad()


def test_saved_and_resumed_is_the_same_in_weights_optimizer_and_state(make: Make, tmp_path: Path) -> None:
    state = State(epoch=2, position=5, step=7, best=0.5, best_epoch=1)
    first = make(state=state)
    train_one_step(first)
    save_epoch(first, improved=True)

    other = State()
    second = make(state=other, resume=tmp_path / "last.pt")
    assert other == state
    assert other.run_id == "this run"
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)
    momenta = [o.state_dict()["state"][0]["momentum_buffer"] for o in (first.optimizer, second.optimizer)]
    assert torch.equal(*momenta)
    assert second.optimizer.param_groups[0]["lr"] == Schedule(0.1, 10, 0, 0)(6)  # as step 7 left it


def test_a_training_that_was_done_already_leaves_its_last_as_it_is(make: Make, tmp_path: Path) -> None:
    save_epoch(make(state=State(epoch=3, step=30)))
    before = (tmp_path / "last.pt").read_bytes()
    make(resume=tmp_path / "last.pt").finish(watch())
    assert (tmp_path / "last.pt").read_bytes() == before
    (tmp_path / "other").mkdir()
    make(directory=tmp_path / "other", resume=tmp_path / "last.pt").finish(watch())  # a fork of it has one of its own
    assert (tmp_path / "other/last.pt").exists()


def test_the_snapshot_is_of_the_moment_whatever_the_training_does_meanwhile(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make()
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    one.writer.prepare({"x": torch.zeros(10_000)})  # type: ignore[union-attr]
    wait(one)
    with held(one):
        one.save_epoch(watch(), {"accuracy": 0.5}, True)
        assert one.writer.busy  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.zero_()
    wait(one)
    for name, value in checkpoint.load(tmp_path / "best.pt")["model"].items():
        assert torch.equal(value, before[name])


def test_files_are_plain_and_load_with_weights_only(make: Make, tmp_path: Path) -> None:
    save_epoch(make(), improved=True)
    for name in ("best.pt", "last.pt"):
        content = torch.load(tmp_path / name, weights_only=True)
        assert content["metrics"] == {"accuracy": 0.5}
        assert content["facts"]["classes"] == ["a", "b", "c"]
    assert files(tmp_path) == ["best.pt", "last.pt"]


def test_best_is_written_only_when_the_metric_improved(make: Make, tmp_path: Path) -> None:
    save_epoch(make())
    assert files(tmp_path) == ["last.pt"]


def test_a_worse_model_does_not_take_the_place_of_a_best_that_was_written_before_a_kill(
    make: Make, tmp_path: Path, logged: list[str]
) -> None:
    """best.pt of epoch 2 is written, last.pt of it is not: the training goes on from epoch 1, or from the start."""
    one = make(state=State(epoch=1, best=0.5, best_epoch=0))
    save_epoch(one, 0.5, improved=True)
    before = (tmp_path / "last.pt").read_bytes()
    one.state.best, one.state.step = 0.9, 9
    save_epoch(one, 0.9, improved=True)
    (tmp_path / "last.pt").write_bytes(before)

    for resume in (tmp_path / "last.pt", None):
        again = make(resume=resume)
        again.state.step = 20
        save_epoch(again, 0.7, improved=True)
        assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.9}
        assert any("best.pt holds a better one (0.9) from before" in line for line in logged)
    again.state.step = 21
    save_epoch(again, 0.9, improved=True)  # the epoch done again, to the same bits
    assert checkpoint.load(tmp_path / "best.pt")["state"]["step"] == 21
    save_epoch(again, 0.95, improved=True)
    assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.95}


def test_going_on_changes_nothing_of_what_the_state_takes_for_the_best(make: Make, tmp_path: Path) -> None:
    """Else early stopping would come elsewhere than without the interruption."""
    save_epoch(make(state=State(epoch=2, best=0.9)), 0.9, improved=True)
    save_epoch(make(state=State(epoch=1, best=0.5, best_epoch=0)), 0.5)
    state = State()
    make(state=state, resume=tmp_path / "last.pt")
    assert (state.best, state.best_epoch, state.epochs_without_gain) == (0.5, 0, 0)


def test_a_best_that_was_lost_before_the_restart_is_made_up_for(make: Make, tmp_path: Path) -> None:
    save_epoch(make(state=State(best=0.5)), 0.5, improved=True)
    make(state=State(best=0.9, step=1)).finish(watch())  # its best.pt could not be written
    save_epoch(make(resume=tmp_path / "last.pt"), 0.7)
    assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.7}


@pytest.mark.parametrize("change", ["damaged", {"metrics": None}, {"facts": {"settings": [1]}}, {"facts": None}])
def test_a_damaged_best_is_replaced(make: Make, tmp_path: Path, logged: list[str], change: Any) -> None:
    save_epoch(make(state=State(best=0.9)), 0.9, improved=True)
    path = tmp_path / "best.pt"
    if change == "damaged":
        path.write_bytes(b"damaged")
    else:
        torch.save({**torch.load(path, weights_only=True), **change}, path)
    save_epoch(make(resume=tmp_path / "last.pt"), 0.7)
    assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.7}
    assert any("best.pt" in line and "the next best takes its place" in line for line in logged)


def test_the_last_before_is_kept(make: Make, tmp_path: Path) -> None:
    one = make()
    for step in (1, 2, 3):
        one.state.step = step
        save_epoch(one)
    kept = [checkpoint.load(tmp_path / name)["state"]["step"] for name in ("last.pt", "last.previous.pt")]
    assert kept == [3, 2]
    assert files(tmp_path) == ["last.previous.pt", "last.pt"]


def test_last_is_written_within_an_epoch_by_time(make: Make, tmp_path: Path) -> None:
    one = make()
    one.save_last_if_due(watch())
    wait(one)
    assert files(tmp_path) == []
    one.settings.every_minutes = 0.0
    one.update.stepped = False
    one.save_last_if_due(watch())
    assert files(tmp_path) == [], "gradients are half gathered"
    one.update.stepped = True
    one.save_last_if_due(watch())
    wait(one)
    assert files(tmp_path) == ["last.pt"]


def test_last_is_written_by_steps(make: Make, tmp_path: Path) -> None:
    one, events = make(every_steps=3), Events()
    for step in range(1, 8):
        one.state.step = step
        one.save_last_if_due(watch(events))
        wait(one)
    again = make(every_steps=3, resume=tmp_path / "last.pt")
    again.state.step = 7
    again.save_last_if_due(watch(events))
    wait(again)
    saves = [event for event in events.seen if event["event"] == "checkpoint"]
    assert [event["step"] for event in saves] == [3, 6]
    assert all(event["pause"] > 0 and event["seconds"] > 0 and event["bytes"] > 1000 for event in saves)


def test_one_save_is_in_flight_and_another_that_is_due_waits_for_a_later_step(make: Make, tmp_path: Path) -> None:
    one = make(every_steps=1)
    save_epoch(one)
    with held(one):
        for step in (1, 2, 3):
            one.state.step = step
            one.save_last_if_due(watch())
        one.save_epoch(watch(), {"accuracy": 0.1}, False)
    wait(one)
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 1
    one.finish(watch())
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 3, "whatever was left out, the end is saved"


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = Run(1, 1, 2, 2, torch.device("cpu"), dir=tmp_path)
    model = network()
    update = Update(model, torch.optim.SGD(model.parameters(), lr=0.1), Schedule(1, 1, 0, 0), run.device, dtype=None)
    update.stepped = True
    settings = SimpleNamespace(every_minutes=0.0, every_steps=1, stop_seconds=20, metric="accuracy", mode="max")
    one = Keeper(run, State(step=1), model, update, {}, settings)
    one.save_last_if_due(watch())
    one.save_epoch(watch(), {"accuracy": 0.5}, improved=True)
    one.finish(watch())
    assert files(tmp_path) == []


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@contextmanager
def files_limited(process: int, size: int) -> Iterator[None]:
    """The disk is full once a file has this size: what the process writes beyond it fails."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, before[1]))
    yield
    resource.prlimit(process, resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_costs_the_save_and_not_the_training(
    make: Make, tmp_path: Path, logged: list[str]
) -> None:
    one, events = make(state=State(step=1)), Events()
    save_epoch(one, 0.5, improved=True)
    with files_limited(saver_of(one), 1000):
        one.state.step = 2
        save_epoch(one, 0.9, improved=True, events=events)
    for name in ("best.pt", "last.pt"):
        assert checkpoint.load(tmp_path / name)["state"]["step"] == 1
        assert any(f"{name}: not saved at step 2 (File too large); the one before is unharmed" in x for x in logged)
    assert files(tmp_path) == ["best.pt", "last.pt"]
    assert [event["file"] for event in events.seen if event["event"] == "checkpoint_failed"] == ["best.pt", "last.pt"]

    one.state.step = 3  # worse than the best that was lost, but better than the one in best.pt
    save_epoch(one, 0.7, improved=False)
    assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.7}
    one.state.step = 4
    save_epoch(one, 0.6, improved=False)
    assert checkpoint.load(tmp_path / "best.pt")["metrics"] == {"accuracy": 0.7}
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 4


def test_free_space_is_looked_at_before(make: Make, tmp_path: Path, logged: list[str]) -> None:
    """A disk of 5 MB: a model that fits once or twice, and not again. Needs root, for the mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", disk], capture_output=True).returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        one = make(nn.Linear(250, 1000), State(step=1), directory=disk)  # 2.0 MB with its momentum
        train = torch.ones(1, 250)
        one.model(train).sum().backward()
        one.optimizer.step()
        save_epoch(one, improved=False)
        assert files(disk) == ["last.pt"]
        one.state.step = 2
        save_epoch(one)
        assert files(disk) == ["last.previous.pt", "last.pt"]
        one.state.step = 3  # the one before gives its room to the best, and then there is none for the last
        save_epoch(one, improved=True)
        held = {name: checkpoint.load(disk / name)["state"]["step"] for name in files(disk)}
        assert held == {"best.pt": 3, "last.pt": 2}
        assert any("MB are to be written, " in x and "last.pt: not saved at step 3" in x for x in logged), logged
        one.writer.close(1)  # type: ignore[union-attr]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_killed_saver_is_said_and_started_again(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    one = make()
    save_epoch(one)
    number = saver_of(one)
    process: Any = one.writer._saver.process  # type: ignore[union-attr]
    process.kill()
    process.wait()
    for half_written in (f".best.pt.{number}.tmp", f".last.pt.{number}.tmp", ".last.pt.1.tmp"):
        (tmp_path / half_written).touch()
    one.state.step = 1
    with monkeypatch.context() as patch:
        patch.setattr(process, "poll", lambda: None)  # it is killed after that look
        save_epoch(one, improved=True)
    assert files(tmp_path) == [".last.pt.1.tmp", "last.pt"], "what it left"
    assert any("best.pt: not saved at step 1 (the saver" in line and "none yet" in line for line in logged)
    save_epoch(one, improved=True)
    assert checkpoint.load(tmp_path / "best.pt")["state"]["step"] == 1


def test_without_memory_for_a_snapshot_the_save_holds_up_the_training(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(host, "memory", lambda: (900, 1000))
    one = make(state=State(step=5))
    one.save_epoch(watch(), {"accuracy": 0.5}, True)
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 5
    assert any("to save behind the training" in line for line in logged)


def test_where_no_process_can_be_started_the_save_holds_up_the_training(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    one = make(state=State(step=5))
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(shutil, "disk_usage", lambda path: refuse() if path == tmp_path else SimpleNamespace(free=1e12))
        one.save_last_if_due(watch())  # prepares, in another thread
        wait(one)
        patch.undo()
        patch.setattr(subprocess, "Popen", refuse)
        save_epoch(one, improved=True)
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 5
    assert any("Resource temporarily unavailable" in line and "to save behind" in line for line in logged), logged
    assert any("its free space can't be read" in line for line in logged)


def test_a_saver_that_is_lost_and_cannot_be_started_again_costs_the_save(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    one = make(state=State(step=5))
    save_epoch(one)
    os.kill(saver_of(one), signal.SIGKILL)
    one.writer._saver.process.wait()  # type: ignore[union-attr]

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    one.state.step = 6
    save_epoch(one)
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 5
    assert any("last.pt: not saved at step 6" in x and "Too many open files" in x for x in logged), logged


class Masked(nn.Module):
    """With a causal mask of minus infinity, as in many transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize("memory", [(0, 10**12), (900, 1000)])  # with and without room for a snapshot
def test_infinity_may_stand_only_in_a_buffer_that_began_with_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], memory: tuple[int, int]
) -> None:
    monkeypatch.setattr(host, "memory", lambda: memory)
    model: Any = Masked()
    one = make(model, State(step=1))
    save_epoch(one)
    assert torch.equal(checkpoint.load(tmp_path / "last.pt")["model"]["mask"], model.mask)
    for name, value in (("norm.running_var", torch.inf), ("norm.weight", -torch.inf), ("mask", torch.nan)):
        tensor = model.state_dict()[name]
        kept = tensor.clone()
        tensor.view(-1)[0] = value
        one.state.step += 1
        save_epoch(one)
        what = "NaN" if value != value else "infinity"
        assert any(f"last.pt: not saved at step {one.state.step} (there is {what} in {name})" in x for x in logged), (
            logged
        )
        tensor.copy_(kept)
    assert checkpoint.load(tmp_path / "last.pt")["state"]["step"] == 1


def test_without_anonymous_files_a_thread_writes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    one = make(state=State(step=5))
    save_epoch(one, improved=True)
    assert one.writer._saver.process is None  # type: ignore[union-attr]
    assert checkpoint.load(tmp_path / "best.pt")["state"]["step"] == 5


def test_a_run_that_could_save_nothing_does_not_end_well(make: Make, tmp_path: Path) -> None:
    one = make(directory=tmp_path / "gone")
    with pytest.raises(UserError, match="no checkpoint could be saved"):
        one.finish(watch())


def test_what_a_kill_left_half_written_is_removed(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".last.pt.123.tmp").write_bytes(b"half")
    save_epoch(make())
    assert files(tmp_path) == ["last.pt"]


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_wrapped_model_saves_clean_keys_that_load_strictly_everywhere(make: Make, tmp_path: Path) -> None:
    plain = network()
    names = list(plain.state_dict())
    compiled: Any = torch.compile(network())  # nothing is compiled before the first call
    save_epoch(make(compiled), improved=True)
    saved = checkpoint.load(tmp_path / "best.pt")["model"]
    assert list(saved) == names
    plain.load_state_dict(saved, strict=True)
    again: Any = torch.compile(network())
    make(again, resume=tmp_path / "last.pt")
    assert torch.equal(again.state_dict()["_orig_mod.0.weight"], saved["0.weight"])


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"classes": ["a", "b"]}, "classes"),
        ({"training_samples": 11}, "training_samples 10, now it is 11"),
        ({"optimizer": "adamw"}, "optimizer sgd, now it is adamw"),
        ({"effective_batch": 16}, "effective batches of 8, now they are 16"),
        ({"training_data": "xyz"}, "within an epoch of other training files"),
    ],
)
def test_resuming_with_other_data_is_refused_by_name(
    make: Make, tmp_path: Path, facts: dict[str, Any], says: str
) -> None:
    save_epoch(make(state=State(position=8)))
    with pytest.raises(UserError, match=says):
        make(resume=tmp_path / "last.pt", **facts)


def test_between_epochs_other_files_of_the_same_number_are_named(make: Make, tmp_path: Path, logged: list[str]) -> None:
    save_epoch(make())
    make(resume=tmp_path / "last.pt", training_data=None)  # the owner's data set has no fingerprint: nothing to compare
    assert not any("training files" in line for line in logged)
    make(resume=tmp_path / "last.pt", training_data="xyz")
    assert any("other training files" in line for line in logged)


@pytest.mark.parametrize("setting", ["seed", "data.shuffle"])
def test_within_an_epoch_its_order_may_not_be_changed(
    make: Make, tmp_path: Path, setting: str, logged: list[str]
) -> None:
    def settings(value: int) -> dict[str, Any]:
        return {"seed": value} if setting == "seed" else {"data": {"shuffle": value}}

    save_epoch(make(state=State(position=8), settings=settings(0)))
    with pytest.raises(UserError, match=rf"within an epoch, and {setting} 0 -> 1 changes the order"):
        make(resume=tmp_path / "last.pt", settings=settings(1))
    save_epoch(make(state=State(epoch=1), settings=settings(0)))
    make(resume=tmp_path / "last.pt", settings=settings(1))
    assert any(f"{setting} 0 -> 1" in line for line in logged)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({"settings": {"seed": 1}}, True),  # the same training files, so the same split
        ({"settings": {"seed": 1}, "training_data": "xyz"}, False),
        ({"settings": {"seed": 1}, "training_data": None}, False),  # not known: taken to be another
        ({"settings": {"seed": 0, "checkpoint": {"metric": "loss"}}}, False),
        ({"settings": {"seed": 0, "checkpoint": {"metric": "accuracy", "every_steps": 5}}}, True),
    ],
)
def test_a_best_of_another_split_or_metric_no_longer_counts(
    make: Make, tmp_path: Path, changed: dict[str, Any], counts: bool, logged: list[str]
) -> None:
    settings = {"seed": 0, "checkpoint": {"metric": "accuracy"}}
    first = make(state=State(epoch=2, best=0.9, best_epoch=0, epochs_without_gain=1), settings=settings)
    save_epoch(first, 0.9, improved=True)
    state = State()
    make(state=state, resume=tmp_path / "last.pt", **changed)
    assert (state.best, state.best_epoch, state.epochs_without_gain) == ((0.9, 0, 1) if counts else (None, None, 0))
    assert any("the best so far, 0.9, no longer counts" in line for line in logged) is not counts


@pytest.mark.parametrize("before", ["fp16", "fp32"])
def test_float16_and_other_precisions_go_on_from_one_another(make: Make, tmp_path: Path, before: str) -> None:
    halves = {"fp16": {"scale": 128.0}, "fp32": {}}

    class Scaler(torch.amp.GradScaler):
        def __init__(self, kind: str) -> None:
            super().__init__("cpu", enabled=kind == "fp16")
            if self._enabled:
                self.load_state_dict({**self.state_dict(), **halves["fp16"]})

    after = "fp32" if before == "fp16" else "fp16"
    one = make()
    one.scaler = Scaler(before)
    train_one_step(one)
    save_epoch(one)
    other = make()
    other.update.scaler = Scaler(after)
    other.resume(tmp_path / "last.pt")
    assert other.state == one.state
    assert torch.equal(next(other.model.parameters()), next(one.model.parameters()))
    assert other.update.scaler.state_dict().get("scale") == (128.0 if after == "fp16" else None)


def test_resumed_with_other_settings_they_are_in_force_and_named(make: Make, tmp_path: Path, logged: list[str]) -> None:
    first = make()
    train_one_step(first)
    save_epoch(first)
    second = make(settings={"seed": 1})
    second.optimizer.param_groups[0]["momentum"] = 0.5
    second.resume(tmp_path / "last.pt")
    assert second.optimizer.param_groups[0]["momentum"] == 0.5
    assert any("seed 0 -> 1" in line for line in logged)


def test_a_model_with_a_part_called_module_can_be_resumed(make: Make, tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    one = Wrapper()
    save_epoch(make(one))
    other = Wrapper()
    make(other, resume=tmp_path / "last.pt")
    assert torch.equal(other.module.weight, one.module.weight)


def test_a_damaged_last_is_not_what_is_gone_on_from(make: Make, tmp_path: Path) -> None:
    one = make()
    for step in (1, 2):
        one.state.step = step
        save_epoch(one)
    path = tmp_path / "last.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    state = State()
    make(state=state, resume=path)
    assert state.step == 1


@pytest.mark.parametrize(
    "change",
    [
        {"facts": None},
        {"model": [1]},
        {"state": {"epoch": "one"}},
        {"state": {"step": None}},
        {"state": {"run_id": 5}},
        {"optimizer": {"state": {0: "x"}}},
        {"state": {"position": 11}},
        {"state": {"position": -1}},
        {"state": {"step": -1}},
        {"format": 99},
        *({"facts": settings} for settings in (None, [1], "text")),
    ],
)
def test_a_checkpoint_with_odd_contents_is_refused_in_one_line(
    make: Make, tmp_path: Path, change: dict[str, Any]
) -> None:
    save_epoch(make())
    path = tmp_path / "last.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "facts": {**content["facts"], "settings": {1: 2, "a": 3}}}, path)
    make(resume=path)  # odd, but all is there
    change = {"facts": {**content["facts"], "settings": change["facts"]}} if "facts" in change else change
    torch.save({**content, **change}, path)
    with pytest.raises(UserError, match=r"^resume=.*last\.pt: ") as caught:
        make(resume=path)
    assert "\n" not in str(caught.value)
