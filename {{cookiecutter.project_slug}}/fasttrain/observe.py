"""The watching of a run: stopwatch, records, gauges and dashboard together, and what is said of the run in its log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from fasttrain import dashboard, logs, profile
from fasttrain.errors import SettingsError, UserError
from fasttrain.feed import Feed
from fasttrain.gauges import Gauges
from fasttrain.looks import Looks
from fasttrain.records import PHASES, BatchRecord, Recorder
from fasttrain.run import Run
from fasttrain.state import State
from fasttrain.update import Update
from fasttrain.verdicts import LiveVerdict
from fasttrain.watch import Watch
from fasttrain.window import WARM_UP


class Totals:
    """The seconds of each phase over the whole run, for the closing words. A view on the records."""

    def __init__(self, world: int) -> None:
        self.world, self.seen, self.images = world, 0, 0
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def batches(self, records: list[BatchRecord]) -> None:
        counted = records[max(0, WARM_UP - self.seen) :]
        self.seen += len(records)
        self.images += sum(record.images for record in counted)
        for phase in PHASES:
            self.seconds[phase] += sum(map(attrgetter(phase), counted))

    def event(self, event: dict[str, Any]) -> None:
        return None

    def draw(self, now: float) -> None:
        return None

    def close(self) -> None:
        return None

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        if total == 0:
            return "too few batches to say where the time went"
        shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in self.seconds.items() if seconds > 0)
        return f"{self.images * self.world / total:,.0f} img/s while batches ran; their time went to {shares}"


class Report:
    """What is written down and said of a run. `watch` is its stopwatch."""

    def __init__(self, run: Run, settings: Any, feed: Feed, update: Update, state: State, classes: int) -> None:
        self.run, self.settings = run, settings
        run.begin_training()
        run.failures.place = lambda: f"epoch {state.epoch + 1}, step {state.step + 1}"
        self.recorder = Recorder(run.dir, run.rank, run.started)
        run.stack.callback(self.recorder.close)
        feed.tell(self.recorder.event)
        update.finite.event = self.recorder.event
        index, uuid = _nvidia(run.device)
        gauges = run.stack.enter_context(Gauges(self.recorder.event, _disk(settings), index, uuid=uuid))
        self.totals = Totals(run.world)
        self.watch = self._stopwatch(feed)
        run.stack.callback(self.watch.abandon)  # after `end` there is nothing left to abandon
        run.stack.enter_context(Looks(self.recorder.event, lambda: self.watch.doing))
        self.verdict = LiveVerdict(run.dir, run.world, run.settings)
        if run.is_main:
            self.recorder.show_on(self.totals)
            self.recorder.show_on(self.verdict)
            self._show_dashboard(feed, state, gauges)
        accumulate, batch = settings.train.accumulate, settings.data.batch_size
        logger.info(
            f"{settings.model.name} on {run.device} in {str(update.dtype or torch.float32).removeprefix('torch.')}; "
            f"{len(feed.train_samples)} training and {len(feed.val_samples)} validation samples, {classes} classes; "
            f"effective batch {feed.global_batch * accumulate} = {batch} x {run.world} processes x {accumulate} "
            f"accumulated; {feed.workers} loader workers a process"
        )

    def epoch(self, epoch: int, state: State, metrics: Mapping[str, float], improved: bool) -> None:
        """After a validation, of the epoch counted from 0."""
        self.recorder.event("validation", epoch=epoch, step=state.step, improved=improved, **metrics)
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        logger.info(f"epoch {epoch + 1}, step {state.step}: {values}{' (best so far)' if improved else ''}")
        if not all(map(math.isfinite, metrics.values())):
            logger.warning(f"epoch {epoch + 1}: a metric that is not finite is never the best")

    def end(self, state: State) -> None:
        """The closing words: the result, where the time went, what to do next."""
        self.watch.close()
        self.recorder.close()
        name = self.settings.checkpoint.metric
        if state.gave_up(self.settings.train.early_stop):
            logger.info(f"stopped early: no better {name} for {state.epochs_without_gain} epochs")
        if self.run.is_main:
            logger.info(f"{state.step} steps; {self.totals}")
            self._say_verdict()
        if state.best is None or state.best_epoch is None:
            logger.warning(f"no finite {name} was reached: there is no best.pt")
            return
        best = self.run.dir / "best.pt"
        where = best if best.exists() else f"no {best}: nothing in this directory was better, or it could not be saved"
        logger.info(f"best {name} {state.best:.4f} in epoch {state.best_epoch + 1}: {where}")
        if best.exists():
            logger.info(f"next: python -m fasttrain evaluate {best}")
        logger.info(f"next: python -m fasttrain report {self.run.dir}")

    def _say_verdict(self) -> None:
        try:
            lines = self.verdict.verdict().lines()
        except Exception as error:  # a fault of ours in judging is no reason for a finished training to fail
            logger.opt(exception=error).warning(f"no verdict: {error}")
            return
        for line in lines:
            logger.info(line)

    def _stopwatch(self, feed: Feed) -> Watch:
        run, wish = self.run, self.settings.profile
        if not profile.wanted(wish, run.rank, run.world):
            return Watch(self.recorder, feed.clock, run.started, run.began)
        where = {"directory": run.dir, "rank": run.rank, "steps": wish.steps, "start": wish.start}
        return profile.ProfilingWatch(self.recorder, feed.clock, run.started, run.began, **where, streams=feed.streams)

    def _show_dashboard(self, feed: Feed, state: State, gauges: Gauges) -> None:
        board, train = self.settings.dashboard, self.settings.train
        per_epoch = feed.batches()
        total = per_epoch * train.epochs
        if train.max_steps is not None:
            total = min(total, train.max_steps * train.accumulate)
        view = dashboard.make_view(
            board.every,
            board.window,
            self.run.world,
            total,
            feed.workers,
            gauges,
            logs.console,
            title=self.run.dir.name,
            verdict=lambda: self.verdict.says,
        )
        view.set_total(total, per_epoch * state.epoch + state.position // feed.global_batch)
        self.recorder.show_on(view)
        if board.tensorboard:
            from fasttrain.tensorboard import TensorBoardView  # half a second and an extra package: only when asked for

            self.recorder.show_on(TensorBoardView(self.run.dir, world=self.run.world))


RESERVED = ("time", "event", "epoch", "step", "improved")  # what else the event of a validation says


def check_metric(metrics: Mapping[str, Any], name: str) -> None:
    """Refuse a ``checkpoint.metric`` that the model does not give, and metrics named like fields of the records."""
    if taken := [each for each in metrics if each in RESERVED]:
        raise UserError(
            f"compute_metrics in model.py: a metric may not be called {taken[0]}, as a field of the records is"
        )
    if name not in metrics:
        raise SettingsError(
            "checkpoint.metric", name, f"one of {', '.join(metrics)}, which compute_metrics in model.py gives"
        )


def _nvidia(device: torch.device) -> tuple[int | None, str | None]:
    """Number and UUID of this device's NVIDIA GPU; None leaves NVML alone (a CPU, AMD or Apple device)."""
    if device.type != "cuda" or torch.version.hip:
        return None, None
    return device.index, str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or None


def _disk(settings: Any) -> Path:
    """The place whose disk is watched: the data's, or where data sets known by name are kept."""
    path = Path(settings.data.path)
    return path if path.exists() else Path(settings.data.root)
