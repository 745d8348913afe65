"""Where a training stands: best, early stopping, the middle of an epoch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.errors import UserError
from fasttrain.observe import RESERVED, Report, check_metric
from fasttrain.state import State, is_better


@pytest.mark.parametrize(
    ("metric", "best", "mode", "better"),
    [
        (0.5, None, "max", True),
        (0.5, 0.4, "max", True),
        (0.5, 0.5, "max", False),
        (0.5, 0.9, "max", False),
        (0.5, 0.9, "min", True),
        (0.0, 0.1, "min", True),
        (-1.0, 0.0, "min", True),
        (0.0, -1.0, "max", True),
        (math.nan, None, "max", False),
        (math.nan, 0.1, "min", False),
        (math.inf, 0.1, "max", False),
        (0.1, math.nan, "max", True),
    ],
)
def test_better(metric: float, best: float | None, mode: str, better: bool) -> None:
    assert is_better(metric, best, mode) is better


def test_stops_early_after_epochs_without_gain() -> None:
    state = State()
    ran = []
    for epoch in state.remaining_epochs(20, None, 3):
        ran.append(epoch)
        metrics = {"accuracy": [0.1, 0.5, 0.4, 0.5, math.nan, 0.9][epoch]}
        state.finish_epoch(metrics, "accuracy", "max", True)
    assert ran == [0, 1, 2, 3, 4]
    assert (state.best, state.best_epoch) == (0.5, 1)
    resumed = State()
    resumed.restore(state.to_dict())
    assert list(resumed.remaining_epochs(20, None, 3)) == [], "a requeued job would never end"
    assert next(resumed.remaining_epochs(20, None, 4)) == 5


def test_a_network_with_any_metric_that_is_not_finite_is_no_best() -> None:
    state = State()
    assert not state.finish_epoch({"accuracy": 0.9, "loss": math.nan}, "accuracy", "max", True)
    assert state.best is None
    assert state.finish_epoch({"accuracy": 0.1, "loss": 1.0}, "accuracy", "max", True)


def test_an_epoch_that_max_steps_cut_short_is_gone_on_with() -> None:
    state = State(epoch=2, position=48, step=10)
    assert list(state.remaining_epochs(5, 10, None)) == []
    state.finish_epoch({"accuracy": 0.5}, "accuracy", "max", complete=False)
    assert (state.epoch, state.position, state.epochs_without_gain) == (2, 48, 0)
    assert next(state.remaining_epochs(5, None, 1)) == 2


def test_everything_is_saved_and_restored() -> None:
    state = State(3, 16, 99, 0.5, 2, 1)
    other = State()
    other.restore(state.to_dict())
    assert other == state


def test_a_checkpoint_without_a_newer_number_can_be_restored() -> None:
    state = State(epochs_without_gain=0)
    state.restore({"epoch": 4})
    assert state == State(epoch=4)


@pytest.mark.parametrize("name", ["time", "event", "epoch", "step", "improved"])
def test_a_metric_with_the_name_of_a_field_is_refused_before_the_training(name: str) -> None:
    with pytest.raises(UserError, match=f"a metric may not be called {name}"):
        check_metric({"accuracy": 0.5, name: 1.0}, "accuracy")


def test_each_field_of_a_validations_event_is_reserved() -> None:
    told: dict[str, Any] = {}
    report = SimpleNamespace(recorder=SimpleNamespace(event=lambda kind, **fields: told.update(fields)))
    Report.epoch(report, 0, State(), {"accuracy": 0.5}, False)  # type: ignore[arg-type]
    assert set(told) - {"accuracy"} <= set(RESERVED)
