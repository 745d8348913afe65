"""The optimizer step: accumulation, clipping, scaling, schedule."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain import parallel
from fasttrain.state import State
from fasttrain.transfer import Batch
from fasttrain.update import Schedule, Update, build_optimizer

CPU = torch.device("cpu")


def batch(number: int, last: int) -> Batch:
    return Batch((), [0], 0, number, last, 0, 0.0, None)


def settings(**changes: Any) -> SimpleNamespace:
    values = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "betas": [0.9, 0.999], "weight_decay": 0.0}
    return SimpleNamespace(**{**values, **changes})


def constant(lr: float) -> Schedule:
    return Schedule(lr, 10**9, 0, 1.0)


def make(accumulate: int = 1, **options: Any) -> tuple[nn.Linear, Update]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, Update(model, optimizer, constant(1.0), CPU, dtype=None, accumulate=accumulate, **options)


def test_accumulated_batches_equal_one_large_one() -> None:
    inputs = torch.randn(10, 4, 3)
    results = []
    for accumulate in (1, 4):
        model, update = make(accumulate)
        state = State()
        chunks = inputs if accumulate == 4 else [torch.cat(list(inputs[i : i + 4])) for i in range(0, 10, 4)]
        for number, chunk in enumerate(chunks):
            with update.forward(batch(number, len(chunks) - 1)):
                loss = model(chunk).square().mean()
            update.backward(loss)
            update.step_if_due(state)
        assert state.step == 3, "the last step of the epoch has only two batches"
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(results[0], results[1])


def test_gradients_are_kept_until_the_step_is_due() -> None:
    model, update = make(accumulate=2)
    state = State()
    before = model.weight.detach().clone()
    for number in range(2):
        with update.forward(batch(number, 9)):
            loss = model(torch.ones(1, 3)).sum()
        update.backward(loss)
        update.step_if_due(state)
        assert update.stepped == (number == 1)
        assert torch.equal(model.weight, before) == (number == 0)
    assert model.weight.grad is None


class Scaler:
    """A scaler of 65536 that writes down the norm which the clipper left and the order of the calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls, self.norm = model, [], 0.0  # type: ignore[var-annotated]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 65536

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("unscale")
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(65536)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("step")
        (parameter,) = self.model.parameters()
        assert parameter.grad is not None
        self.norm = float(parameter.grad.norm())

    def update(self) -> None:
        self.calls.append("update")


@pytest.mark.parametrize(("size", "norm"), [(0.1, 0.1), (5.0, 1.0)])
def test_the_clipper_sees_true_gradients(size: float, norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    scaler = Scaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    update = Update(model, optimizer, constant(1.0), CPU, dtype=None, clip_norm=1.0, scaler=scaler)
    with update.forward(batch(0, 0)):
        loss = model(torch.tensor([[size, 0.0, 0.0]])).sum()
    update.backward(loss)
    update.step_if_due(State())
    assert scaler.calls == ["unscale", "step", "update"]
    assert scaler.norm == pytest.approx(norm, rel=1e-4)


def test_fp16_scales_and_a_step_with_infinite_gradients_is_skipped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    optimizer = build_optimizer(model, settings())
    update = Update(model, optimizer, constant(0.1), CPU, dtype=torch.float16)
    assert update.scaler.is_enabled()
    before, scale = model.weight.detach().clone(), update.scaler.get_scale()
    with update.forward(batch(0, 0)):
        assert model(torch.ones(1, 3)).dtype == torch.float16
        loss = model(torch.ones(1, 3)).float().sum() * 1e30
    update.backward(loss)
    update.step_if_due(State())
    assert torch.equal(model.weight, before)
    assert update.scaler.get_scale() == scale / 2
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    assert not momentum.any(), "the skipped step left its mark on the next one"


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_are_fused_and_spare_biases_and_norms_from_weight_decay(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = build_optimizer(model, settings(name=name, weight_decay=0.1))
    assert all(group["fused"] for group in optimizer.param_groups)
    decays = {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_schedule_warms_up_and_ends_as_a_cosine() -> None:
    rate = Schedule(1.0, total=110, warmup=10, final=0.1)
    assert [rate(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == rate(500) == pytest.approx(0.1)
    assert all(rate(step) >= rate(step + 1) for step in range(10, 110))


def test_a_warm_up_longer_than_the_training_is_shortened() -> None:
    assert Schedule(1.0, total=10, warmup=1000, final=0.0)(2) == pytest.approx(1.0)


def test_the_rate_of_the_schedule_reaches_the_optimizer() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    update = Update(model, optimizer, Schedule(1.0, 10, 2, 0.0), CPU, dtype=None)
    with update.forward(batch(0, 9)):
        loss = model(torch.ones(1, 3)).sum()
    update.backward(loss)
    before = model.weight.detach().clone()
    update.step_if_due(State())
    torch.testing.assert_close(before - model.weight.detach(), torch.full((1, 3), 0.5))
    assert update.lr == 0.5


@pytest.mark.parametrize("ends", ["well", "raises"])
def test_a_part_kept_in_evaluation_mode_stays_so_after_a_validation(ends: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()
    with suppress(KeyError), parallel.evaluating(model) as plain:
        assert plain is model
        assert not any(part.training for part in model.modules())
        if ends == "raises":
            raise KeyError
    assert [part.training for part in model.modules()] == [True, True, False, True]
