"""What is not finite: found on every rank alike, kept out of the weights and buffers, stopped at or skipped."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Train
from loguru import logger
from torch import nn

from fasttrain import finite
from fasttrain.errors import UserError
from fasttrain.snapshot import is_finite
from fasttrain.state import State
from fasttrain.transfer import Batch
from fasttrain.update import Schedule, Update, build_optimizer
from fasttrain.writer import Writer

CPU = torch.device("cpu")


class Loop:
    """A small training: `step(factor)` multiplies the loss by it."""

    def __init__(self, on_nan: str = "skip", optimizer: str = "sgd", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        values = {"name": optimizer, "lr": 0.1, "momentum": 0.9, "betas": [0.9, 0.999], "weight_decay": 0.1}
        made = build_optimizer(self.model, SimpleNamespace(**values))
        options = {"dtype": None, **options}
        self.update = Update(self.model, made, Schedule(0.1, 10**9, 0, 1.0), CPU, on_nan=on_nan, **options)
        self.state, self.number = State(), 0
        self.events: list[dict[str, Any]] = []
        self.update.finite.event = lambda kind, **fields: self.events.append(fields)

    def step(self, factor: float | torch.Tensor = 1.0, last: bool = False, spoil: bool = False) -> None:
        number, self.number = self.number, self.number + 1
        with self.update.forward(
            Batch((), [2 * number, 2 * number + 1], 0, number, number if last else 99, 0, 0.0, None)
        ):
            inputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(number))
            loss = self.model(inputs * math.nan if spoil else inputs).float().square().mean()
        self.update.backward(loss * factor)
        self.update.step_if_due(self.state)

    def take(self, loss: torch.Tensor) -> None:
        """A step with this loss."""
        self.update.backward(loss)
        self.update.step_if_due(self.state)

    def everything(self) -> list[torch.Tensor]:
        """Weights, batch statistics, the optimizer's memory."""
        memory = [value for each in self.update.optimizer.state.values() for value in each.values()]
        floats = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        return [value.clone() for value in (*floats, *memory)]


@pytest.fixture
def said() -> Any:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    yield lines
    logger.remove(sink)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_skipped_step_leaves_no_trace(optimizer: str, factor: float) -> None:
    loop = Loop(optimizer=optimizer)
    loop.step()
    before = loop.everything()
    loop.step(factor)
    assert all(map(torch.equal, before, loop.everything()))
    assert loop.state.step == 2
    loop.step()
    assert not torch.equal(before[0], loop.everything()[0])


def test_batch_statistics_that_saw_a_nan_are_put_back() -> None:
    loop = Loop()
    loop.step()
    before = loop.everything()
    loop.step(spoil=True)
    assert all(map(torch.equal, before, loop.everything()))


def test_a_loss_that_is_nan_over_gradients_that_are_not_is_found() -> None:
    loop = Loop("stop")
    with pytest.raises(UserError, match="the loss is nan on rank 0"):
        loop.take(loop.model(torch.ones(2, 3)).mean() + math.nan)


def test_a_gradient_that_is_not_finite_under_a_loss_that_is_is_found() -> None:
    loop = Loop("stop")
    loss = (loop.model(torch.ones(2, 3)).mean() * 0).sqrt()  # 0, and its slope there is infinite
    assert loss == 0
    with pytest.raises(UserError, match="the gradients are not finite"):
        loop.take(loss)


def test_stop_names_step_rate_and_samples() -> None:
    loop = Loop("stop", names=lambda indices: [f"image{index}.png" for index in indices])
    loop.step()
    words = r"epoch 1, step 2, learning rate 0\.1: the loss is nan on rank 0, samples 2, 3 \(image2\.png, image3\.png\)"
    with pytest.raises(UserError, match=words):
        loop.step(math.nan)


def test_skip_warns_counts_and_ends_after_too_many_in_a_row(said: list[str]) -> None:
    loop = Loop("skip")
    for _ in range(3):
        loop.step(math.nan)
        loop.step()
    assert [fields["step"] for fields in loop.events] == [1, 3, 5]
    assert [line for line in said if "3. so far" in line]
    for _ in range(finite.MOST_IN_A_ROW - 1):
        loop.step(math.nan)
    with pytest.raises(UserError, match=f"the {finite.MOST_IN_A_ROW}th step in a row"):
        loop.step(math.nan)


def test_a_scaler_that_looks_for_its_scale_is_no_event_but_an_endless_search_is() -> None:
    """Finite losses, gradients that overflow float16."""
    loop = Loop("stop", dtype=torch.float16)
    for _ in range(finite.MOST_IN_A_ROW_SCALED):
        loop.step(1e30)
    assert not loop.events
    with pytest.raises(UserError, match="the gradients are not finite"):
        loop.step(1e30)


def test_a_nan_loss_under_a_scaler_is_an_event() -> None:
    with pytest.raises(UserError, match="the loss is nan"):
        Loop("stop", dtype=torch.float16).step(math.nan)


def test_losses_are_told_as_the_model_gave_them() -> None:
    """Neither multiplied by the scaler's 65536 nor divided by the batches of a step."""
    loop = Loop("skip", dtype=torch.float16, accumulate=2)
    told: list[float] = []
    backward = loop.update.backward

    def remember(loss: torch.Tensor) -> None:
        told.append(float(loss.detach()))
        backward(loss)

    loop.update.backward = remember  # type: ignore[method-assign]
    loop.step()
    loop.step(math.nan)
    assert loop.events[0]["losses"] == [told[0], pytest.approx(math.nan, nan_ok=True)]


def test_a_nan_in_one_batch_of_an_accumulated_step_leaves_out_the_step() -> None:
    loop = Loop("skip", accumulate=2)
    before = loop.everything()
    loop.step(math.nan)
    loop.step()
    assert all(map(torch.equal, before, loop.everything()))
    assert loop.events[0]["samples"] == [0, 1, 2, 3]


class Event:
    """An event of a device that is as far behind as the host lets it be."""

    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The way of a device, played on the CPU; the numbers of the events that the host waited for."""
    waited: list[int] = []
    count = iter(range(1, 1000))
    monkeypatch.setattr(finite, "_to_host", lambda found: (found.clone(), Event(next(count), waited)))
    return waited


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_a_device_the_optimizer_leaves_out_the_step_and_the_host_learns_it_later(
    device: list[int], optimizer: str
) -> None:
    loop = Loop("stop", optimizer=optimizer)
    loop.update.finite.on_device = True
    loop.step()
    before = loop.everything()
    loop.step(spoil=True)
    assert all(map(torch.equal, before, loop.everything()))
    for _ in range(finite.LAG - 1):
        loop.step()
    assert not device[1:], "the host waited for a step that it need not know of yet"
    with pytest.raises(UserError, match="step 2, learning rate"):
        loop.step()
    assert device == [1, 2]


def test_on_a_device_all_findings_are_read_at_the_end_of_an_epoch(device: list[int]) -> None:
    loop = Loop("stop")
    loop.update.finite.on_device = True
    loop.step(math.nan)
    with pytest.raises(UserError, match="step 1, learning rate"):
        loop.step(last=True)


def test_on_a_device_findings_are_read_where_max_steps_ends(device: list[int]) -> None:
    loop = Loop("stop")
    loop.update.finite.on_device = True
    loop.update.batches_left(loop.state, 2)
    loop.step(math.nan)
    with pytest.raises(UserError, match="step 1, learning rate"):
        loop.step()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_tensor_with_one_number_that_is_not_finite_is_seen(wrong: float) -> None:
    assert not is_finite(torch.tensor([0.0, wrong, 1.0]))
    assert is_finite(torch.tensor([0.0, -1.0]))
    assert is_finite(torch.zeros(0))
    assert is_finite(torch.tensor([2**60]))


def test_a_checkpoint_with_nan_is_not_written_and_the_one_before_stays(tmp_path: Path) -> None:
    writer = Writer(tmp_path, CPU)
    answers: list[dict[str, Any]] = []
    for value in (1.0, math.nan, 2.0):
        writer.save({"model": {"weight": torch.full((3,), value)}}, [("last.pt", "last.previous.pt")], answers.append)
        writer.wait()
    writer.close(5.0)
    assert ["error" in answer["last.pt"] for answer in answers] == [False, True, False]
    assert "NaN" in answers[1]["last.pt"]["error"]
    assert torch.load(tmp_path / "last.previous.pt", weights_only=True)["model"]["weight"].tolist() == [1.0] * 3


def finite_checkpoint(path: Path) -> bool:
    def numbers(part: Any) -> Any:
        if isinstance(part, dict):
            for value in part.values():
                yield from numbers(value)
        elif isinstance(part, (list, tuple)):
            for value in part:
                yield from numbers(value)
        elif isinstance(part, torch.Tensor):
            yield bool(part.isfinite().all())
        elif isinstance(part, float):
            yield math.isfinite(part)

    return all(numbers(torch.load(path, weights_only=True)))


def test_nan_on_one_rank_stops_both_at_the_same_step(train: Train) -> None:
    fault = "nan@rank=1,step=8"  # in the second epoch: best.pt and last.pt are there
    run = train("stop", "train.epochs=3", processes=2, FASTTRAIN_FAULT=fault)
    assert run.code != 0
    for rank in (0, 1):
        assert len(run.records(rank)) == 8
        log = (run.dir / f"rank{rank}.log").read_text()
        assert "epoch 2, step 8, learning rate" in log, log
        assert "the loss is nan on rank 1, samples" in log, log
    assert run.output.count("The step was not taken") <= 3, run.output  # once by us, and in torchrun's own report
    assert finite_checkpoint(run.dir / "best.pt")
    assert finite_checkpoint(run.dir / "last.pt")


def test_nan_steps_are_skipped_on_both_ranks_and_nothing_of_them_is_saved(train: Train) -> None:
    """In the first epoch, with a save after every step."""
    settings = ("train.on_nan=skip", "checkpoint.every_minutes=1e-9")
    run = train("skip", *settings, processes=2, FASTTRAIN_FAULT="nan@rank=1,step=1;nan@rank=0,step=3")
    assert run.code == 0, run.output
    assert run.checkpoint()["state"]["step"] == 6
    for rank in (0, 1):
        log = (run.dir / f"rank{rank}.log").read_text()
        assert "The step was left out, the 2. so far" in log, log
    assert finite_checkpoint(run.dir / "best.pt")
    assert finite_checkpoint(run.dir / "last.pt")
