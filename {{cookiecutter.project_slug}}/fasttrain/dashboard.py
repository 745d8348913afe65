"""The dashboard: when to draw, the choice between panel and lines, and the plain line that a file or a CI log gets.

window.py turns records into a `Summary`; the panel (dashboard_panel.py) and the line show the same one. All of it runs
in the recorder's thread, never in the training's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Protocol

from loguru import logger
from rich.console import Console

from fasttrain.gauges import Sample
from fasttrain.records import BatchRecord
from fasttrain.window import Summary, Window

NARROWEST, LOWEST = 72, 20  # columns and lines that the panel needs; a smaller terminal gets lines


class Sampler(Protocol):
    """Where the last gauges are read from (gauges.Gauges)."""

    @property
    def latest(self) -> Sample | None: ...


class Progress:
    """How far the run is, in batches of this rank."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.before = 0  # batches done before this process began (a resumed run)

    def done(self, window: Window) -> int:
        return self.before + window.seen

    def left(self, window: Window, summary: Summary) -> float | None:
        """Seconds of training left at the median time of a batch, pauses not counted; None where unknown."""
        return None if self.total is None else max(0, self.total - self.done(window)) * summary.wall


class Dashboard:
    """What both views share: the window, the progress, the last validation, and when it is time to draw."""

    least = 0.25  # seconds between two drawings

    def __init__(self, every: int, window: Window, total_batches: int | None, gauges: Sampler | None) -> None:
        self.window = window
        self.progress = Progress(total_batches)
        self.validation: dict[str, Any] | None = None  # the last one's event
        self.verdict: Callable[[], str | None] = lambda: None
        self._every, self._gauges = every, gauges
        self._drawn_at = -math.inf
        self._drawn_batches = 0

    def set_total(self, total_batches: int | None, done: int = 0) -> None:
        """The run's number of batches on this rank, and how many of them were done before this process began."""
        self.progress.total, self.progress.before = total_batches, done

    def batches(self, records: list[BatchRecord]) -> None:
        self.window.add(records)

    def event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "validation":
            self.validation = event

    def draw(self, now: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @property
    def sample(self) -> Sample:
        return (self._gauges.latest if self._gauges else None) or Sample()

    def due(self, now: float) -> bool:
        """Whether to draw: a further multiple of `every` batches is complete, the last drawing not too recent."""
        return self._more() and now - self._drawn_at >= self.least

    def _more(self) -> bool:
        return self.window.seen // self._every > self._drawn_batches // self._every

    def drawn(self, now: float) -> None:
        self._drawn_at, self._drawn_batches = now, self.window.seen


class Lines(Dashboard):
    """One plain line on the console, at most one a second; in order with the log's lines, since it is one of them."""

    least = 1.0

    def draw(self, now: float) -> None:
        if self.due(now):
            self._say()
            self.drawn(now)

    def close(self) -> None:
        if self._more():
            self._say()

    def _say(self) -> None:
        if summary := self.window.summary():
            logger.bind(only="console").info(line(summary, self))


def line(summary: Summary, board: Dashboard) -> str:
    """The summary in one line of ASCII. For people epochs count from 1; in the records they count from 0."""
    parts = [f"epoch {summary.epoch + 1} step {summary.step}"]
    left = board.progress.left(board.window, summary)
    if left is not None:
        parts[0] += f", {board.progress.done(board.window)} of {board.progress.total} batches, {duration(left)} left"
    parts.append(f"{summary.images_per_second:.0f} img/s, {summary.wall * 1e3:.1f} ms")
    parts.append(", ".join(f"{name} {share:.0%} {ms * 1e3:.1f}" for name, (share, ms) in summary.phases.items()))
    parts.append(
        f"ready {number(summary.ready)}, data/compute {number(summary.data_ratio, '.2f')}, "
        f"long waits {summary.long_waits} of {summary.batches}"
    )
    parts.append(f"loss {number(summary.loss_mean, '.4f')} lr {number(summary.lr, '.3g')}")
    sample = board.sample
    gpu = [
        number(value, form, unit)
        for value, form, unit in (
            (sample.gpu, ".0f", "%"),
            (sample.gpu_memory_used, "GB", " GB"),
            (sample.gpu_temperature, ".0f", " C"),
            (sample.gpu_power, ".0f", " W"),
        )
        if value is not None
    ]
    parts.append(
        f"GPU {' '.join(gpu) or 'n/a'}, "
        f"CPU {number(sample.cpu, '.0f', '%')}, memory {number(sample.memory_used, 'GB', ' GB')}, "
        f"disk {number(sample.disk_read, '.1f', ' MB/s')} busy {number(sample.disk_busy, '.0f', '%')}"
    )
    if verdict := board.verdict():
        parts.append(verdict)
    return " | ".join(parts) + ("" if summary.steady else " | warming up")


def number(value: float | None, form: str = "", unit: str = "") -> str:
    """A number for people: ``n/a`` for None; the form ``GB`` shows bytes in units of 10^9."""
    if value is None:
        return "n/a"
    return f"{value / 1e9:.1f}{unit}" if form == "GB" else f"{value:{form}}{unit}"


def duration(seconds: float) -> str:
    """``45 s``, ``4 min 12 s``, ``3 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def make_view(
    every: int,
    window: int,
    world: int,
    total_batches: int | None,
    workers: int,
    gauges: Sampler | None,
    console: Console,
    title: str = "",
    verdict: Callable[[], str | None] = lambda: None,
) -> Dashboard:
    """The view that suits this console: a live panel on a terminal, plain lines in a file, in CI or where it won't fit.

    Args:
        every: batches between two drawings.
        window: batches that shares and medians are taken over.
        world: number of ranks.
        total_batches: of the whole run on this rank; None where unknown (`set_total` gives it later).
        workers: loader processes of this rank.
        gauges: its `latest` is shown.
        console: the console that the log is printed on.
        title: shown above, say the run directory.
        verdict: what holds the training back, in one line.
    """
    records = Window(window, world, workers)
    if suits_panel(console):
        from fasttrain.dashboard_panel import LivePanel  # only here: rich's live display takes time to import

        view: Dashboard = LivePanel(every, records, total_batches, gauges, console, title)
    else:
        view = Lines(every, records, total_batches, gauges)
    view.verdict = verdict
    return view


def suits_panel(console: Console) -> bool:
    """Whether a live panel can be drawn: a terminal that moves its cursor, large enough, with a person at it."""
    isatty: Callable[[], bool] = getattr(console.file, "isatty", lambda: False)
    if not isatty() or console.is_dumb_terminal or os.environ.get("CI"):
        return False
    return console.is_terminal and console.width >= NARROWEST and console.height >= LOWEST
