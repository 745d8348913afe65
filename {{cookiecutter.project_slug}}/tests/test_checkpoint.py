"""Checkpoints are whole, plain, clean, and loadable in every combination of wrappers."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loguru import logger
from torch import nn

from fasttrain import checkpoint
from fasttrain.clock import HostClock
from fasttrain.errors import UserError
from fasttrain.keeper import Keeper
from fasttrain.run import Run
from fasttrain.state import State
from fasttrain.update import Schedule, Update
from fasttrain.watch import Watch


class Nowhere:
    def batch(self, record: Any) -> None: ...
    def event(self, kind: str, /, **fields: Any) -> None: ...


def watch() -> Watch:
    return Watch(Nowhere(), HostClock(), 0.0, 0.0)


@pytest.fixture
def caplog_lines() -> Iterator[list[str]]:
    """What loguru is given."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)))
    yield lines
    logger.remove(sink)


def network(classes: int = 3) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


def keeper(directory: Path, model: nn.Module, state: State, resume: Path | None = None, **facts: Any) -> Keeper:
    run = Run(0, 0, 1, 1, torch.device("cpu"), dir=directory, resume=resume)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(model, optimizer, Schedule(0.1, 10, 0, 0), torch.device("cpu"), dtype=None)
    plain = {"classes": ["a", "b", "c"], "training_samples": 10, "optimizer": "sgd", "effective_batch": 8}
    facts = {**plain, "settings": {"seed": 0}, **facts}
    settings = SimpleNamespace(
        every_minutes=1e9, every_steps=None, stop_seconds=20, metric="accuracy", mode="max"
    )
    return Keeper(run, state, model, update, facts, settings)


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_saved_and_resumed_is_the_same_in_weights_optimizer_and_state(tmp_path: Path) -> None:
    state = State(epoch=2, position=5, step=7, best=0.5, best_epoch=1)
    first = keeper(tmp_path, network(), state)
    train_one_step(first.model, first.optimizer)
    first.save_epoch(watch(), {"accuracy": 0.5}, improved=True)

    other = State()
    second = keeper(tmp_path, network(), other, resume=tmp_path / "last.pt")
    assert other == state
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value)
    momenta = [o.state_dict()["state"][0]["momentum_buffer"] for o in (first.optimizer, second.optimizer)]
    assert torch.equal(*momenta)


def test_files_are_plain_and_load_with_weights_only(tmp_path: Path) -> None:
    keeper(tmp_path, network(), State()).save_epoch(watch(), {"accuracy": 0.5}, improved=True)
    for name in ("best.pt", "last.pt"):
        content = torch.load(tmp_path / name, weights_only=True)
        assert content["metrics"] == {"accuracy": 0.5}
        assert content["facts"]["classes"] == ["a", "b", "c"]
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_best_is_written_only_when_the_metric_improved(tmp_path: Path) -> None:
    one = keeper(tmp_path, network(), State())
    one.save_epoch(watch(), {}, improved=False)
    assert sorted(os.listdir(tmp_path)) == ["last.pt"]


def test_last_is_written_within_an_epoch_when_it_is_time(tmp_path: Path) -> None:
    one = keeper(tmp_path, network(), State())
    one.save_last_if_due(watch())
    assert os.listdir(tmp_path) == []
    one.every = 0.0
    one.save_last_if_due(watch())
    assert os.listdir(tmp_path) == [], "gradients are half gathered"
    one.update.stepped = True
    one.save_last_if_due(watch())
    assert os.listdir(tmp_path) == ["last.pt"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    one = keeper(tmp_path, network(), State())
    one.writes = False
    one.every = 0.0
    one.update.stepped = True
    one.save_last_if_due(watch())
    one.save_epoch(watch(), {}, improved=True)
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    checkpoint.save(path, {"value": 1})
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(path, {"value": lambda: 0})
    assert checkpoint.load(path) == {"value": 1}
    assert os.listdir(tmp_path) == ["best.pt"]


@pytest.mark.parametrize(
    "prefixes",
    [("module.", ""), ("_orig_mod.", ""), ("module._orig_mod.", ""), ("_orig_mod.module.", ""), ("", "_orig_mod.")],
)
def test_prefixes_of_wrappers_are_taken_off(prefixes: tuple[str, str]) -> None:
    start, inner = prefixes
    assert checkpoint.clean_keys({f"{start}body.{inner}weight": 1}, ["body.weight"]) == {"body.weight": 1}


def test_a_wrapped_model_saves_clean_keys_that_load_strictly_everywhere(tmp_path: Path) -> None:
    plain = network()
    names = list(plain.state_dict())
    compiled: Any = torch.compile(network())  # nothing is compiled before the first call
    one = keeper(tmp_path, compiled, State())
    one.save_epoch(watch(), {}, improved=True)
    saved = checkpoint.load(tmp_path / "best.pt")["model"]
    assert list(saved) == names
    plain.load_state_dict(saved, strict=True)
    again: Any = torch.compile(network())
    keeper(tmp_path, again, State(), resume=tmp_path / "last.pt")
    assert torch.equal(again.state_dict()["_orig_mod.0.weight"], saved["0.weight"])


def test_weights_start_a_model_with_another_number_of_classes(tmp_path: Path) -> None:
    source, target = network(3), network(5)
    checkpoint.save(tmp_path / "a.pt", {"model": source.state_dict()})
    fresh = target[3].weight.detach().clone()
    checkpoint.load_weights(target, tmp_path / "a.pt")
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[3].weight, fresh)


def test_plain_files_of_weights_load_too(tmp_path: Path) -> None:
    source, target = network(), network()
    torch.save({f"module.{k}": v for k, v in source.state_dict().items()}, tmp_path / "a.pth")
    checkpoint.load_weights(target, tmp_path / "a.pth")
    assert torch.equal(target[0].weight, source[0].weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "0.bias"}, "lacks 0.bias"),
        (lambda w: {**w, "9.bias": torch.ones(1)}, "has the unknown 9.bias"),
        (lambda w: {**w, "0.bias": torch.ones(9)}, r"0.bias has shape \(9,\), the model has \(4,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, says: str) -> None:
    checkpoint.save(tmp_path / "a.pt", {"model": change(network().state_dict())})
    with pytest.raises(UserError, match=says):
        checkpoint.load_weights(network(), tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"classes": ["a", "b"]}, "classes"),
        ({"training_samples": 11}, "training_samples 10, now it is 11"),
        ({"optimizer": "adamw"}, "optimizer sgd, now it is adamw"),
        ({"effective_batch": 16}, "effective batches of 8, now they are 16"),
    ],
)
def test_resuming_with_other_data_is_refused_by_name(tmp_path: Path, facts: dict[str, Any], says: str) -> None:
    keeper(tmp_path, network(), State(position=8)).save_epoch(watch(), {}, improved=False)
    with pytest.raises(UserError, match=says):
        keeper(tmp_path, network(), State(), resume=tmp_path / "last.pt", **facts)


def test_resumed_with_other_settings_they_are_in_force_and_named(tmp_path: Path, caplog_lines: list[str]) -> None:
    first = keeper(tmp_path, network(), State())
    train_one_step(first.model, first.optimizer)
    first.save_epoch(watch(), {}, improved=False)
    second = keeper(tmp_path, network(), State(), settings={"seed": 1})
    second.optimizer.param_groups[0]["momentum"] = 0.5
    second.resume(tmp_path / "last.pt")
    assert second.optimizer.param_groups[0]["momentum"] == 0.5
    assert any("seed 0 -> 1" in line for line in caplog_lines)


def test_a_model_with_a_part_called_module_can_be_resumed(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    one = Wrapper()
    keeper(tmp_path, one, State()).save_epoch(watch(), {}, improved=False)
    other = Wrapper()
    keeper(tmp_path, other, State(), resume=tmp_path / "last.pt")
    assert torch.equal(other.module.weight, one.module.weight)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "change",
    [
        {"facts": None},
        {"model": [1]},
        {"state": {"epoch": "one"}},
        {"state": {"step": None}},
        {"optimizer": {"state": {0: "x"}}},
        {"format": 99},
    ],
)
def test_a_checkpoint_with_odd_contents_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    keeper(tmp_path, network(), State()).save_epoch(watch(), {}, improved=False)
    path = tmp_path / "last.pt"
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    with pytest.raises(UserError, match=r"^resume=.*last\.pt: ") as caught:
        keeper(tmp_path, network(), State(), resume=path)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_in_one_line_and_the_old_file_stays(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "last.pt"
    checkpoint.save(path, {"value": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing past the limit is then an error, not the end
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match="can't be saved"):
            checkpoint.save(path, {"value": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoint.load(path) == {"value": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "cut", "harmful", "list"])
def test_a_file_that_is_no_checkpoint_ends_in_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("hello\n" * 100)
    elif kind == "cut":
        torch.save({"a": torch.ones(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "harmful":
        with path.open("wb") as file:
            pickle.dump(Harmful(), file)
    elif kind == "list":
        torch.save([1], path)
    with pytest.raises(UserError, match=r"a\.pt") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()
