"""The dashboard on a terminal: a live panel under the log's lines, drawn by the recorder's thread."""

from __future__ import annotations

import sys
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fasttrain.dashboard import Dashboard, Sampler, duration, number
from fasttrain.gauges import Sample
from fasttrain.sinks import escaped
from fasttrain.window import Summary, Window

COLOURS = {
    "wait": "red",
    "copy": "yellow",
    "forward": "green",
    "backward": "green",
    "optimizer": "cyan",
    "other": "magenta",
}
BAR = 30  # columns
LABEL = 10  # columns of the names, so that both tables line up
WIDEST = 100  # columns, where the terminal has them


class LivePanel(Dashboard):
    """Redraws when `every` further batches are done or the gauges changed, at most four times a second.

    Args:
        every: batches between two drawings.
        window: the batches it shows.
        total_batches: of the whole run on this rank, None where unknown.
        gauges: its `latest` is shown.
        console: the console that the log is printed on.
        title: shown in the frame.
    """

    least = 0.24  # a little under the recorder's quarter of a second, so that no look is skipped

    def __init__(
        self,
        every: int,
        window: Window,
        total_batches: int | None,
        gauges: Sampler | None,
        console: Console,
        title: str = "",
    ) -> None:
        super().__init__(every, window, total_batches, gauges)
        self._console, self._title = console, title
        self._live: Live | None = None
        self._changed = False

    def event(self, event: dict[str, Any]) -> None:
        super().event(event)
        self._changed = self._changed or event.get("event") in ("gauges", "validation")

    def due(self, now: float) -> bool:
        return (self._changed or self._more()) and now - self._drawn_at >= self.least

    def draw(self, now: float) -> None:
        if self.window.seen and self.due(now):
            self._refresh()
            self.drawn(now)
            self._changed = False

    def close(self) -> None:
        """Leaves the last state on the screen and gives the cursor back."""
        if self._live is None:
            return
        try:
            self._refresh()
        finally:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),  # prints go above the panel, unless they go to a file
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.update(self.render(), refresh=True)

    def render(self) -> RenderableType:
        """The panel as it stands now."""
        ascii_only = self._console.options.ascii_only
        summary = self.window.summary()
        parts: list[RenderableType] = [self._head(summary, ascii_only)]
        if summary is not None:
            parts += [phase_table(summary, ascii_only), self._rows(summary, ascii_only)]
        title = escaped(self._title).replace("\n", " ")
        return Panel(
            Group(*parts),
            title=Text(f" {title} ", "bold") if title else None,
            box=box.ASCII if ascii_only else box.ROUNDED,
            border_style="dim",
            width=WIDEST,
        )

    def _head(self, summary: Summary | None, ascii_only: bool) -> Text:
        if summary is None:
            return Text("the first batches: warming up")
        text = Text.assemble(
            "epoch ", (str(summary.epoch + 1), "bold"), "   step ", (f"{summary.step:,}", "bold"), "   "
        )
        total, done = self.progress.total, self.progress.done(self.window)
        left = self.progress.left(self.window, summary)
        if total and left is not None:
            part = min(1.0, done / total)
            text.append_text(bar(part, 20, "blue", ascii_only))
            text.append(f" {part:.0%}   {duration(left)} left")
        if not summary.steady:
            text.append("   warming up", "dim")
        return text

    def _rows(self, summary: Summary, ascii_only: bool) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, min_width=LABEL)
        grid.add_column(overflow="fold")
        for name, text in (
            *loader_rows(summary),
            *self._learning_rows(summary),
            *gauge_rows(self.sample, ascii_only),
            *self._verdict_rows(),
        ):
            grid.add_row(name, text)
        return grid

    def _verdict_rows(self) -> list[tuple[str, Text]]:
        says = self.verdict()
        return [("verdict", Text(escaped(says)))] if says else []

    def _learning_rows(self, summary: Summary) -> list[tuple[str, Text]]:
        loss = f"{number(summary.loss, '.4f')}, mean {number(summary.loss_mean, '.4f')}"
        rows = [("loss", Text(f"{loss}   lr {number(summary.lr, '.3g')}"))]
        if self.validation:
            known = ((key, value) for key, value in self.validation.items() if key != "time")
            shown = ", ".join(f"{escaped(key)} {value:.4f}" for key, value in known if isinstance(value, float))
            epoch = self.validation.get("epoch")
            rows.append(("validation", Text(shown if epoch is None else f"{shown}   epoch {epoch + 1}")))
        return rows


def phase_table(summary: Summary, ascii_only: bool) -> Table:
    """A row for each phase: its bar, its share of the time, its median in milliseconds; the whole batch below."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=LABEL)
    table.add_column(width=BAR)
    table.add_column(justify="right", width=5)
    table.add_column(justify="right", width=11)
    table.add_column(justify="right", no_wrap=True)
    for name, (share, middle) in summary.phases.items():
        table.add_row(name, bar(share, BAR, COLOURS[name], ascii_only), f"{share:.0%}", f"{middle * 1e3:.1f} ms", "")
    rate = f"{summary.images_per_second:,.0f} img/s"
    table.add_row("batch", "", "", Text(f"{summary.wall * 1e3:.1f} ms", "bold"), Text(rate, "bold"))
    return table


def bar(part: float, width: int, colour: str, ascii_only: bool) -> Text:
    """A bar of `width` columns, filled by `part` (0 to 1)."""
    filled = round(min(1.0, max(0.0, part)) * width)
    full, empty = ("#", "-") if ascii_only else ("█", "░")
    return Text.assemble((full * filled, colour), (empty * (width - filled), "dim"))


def loader_rows(summary: Summary) -> list[tuple[str, Text]]:
    """Batches ready and the data-to-compute ratio; how often the wait was long, in red from one batch in five."""
    ready = f"ready {number(summary.ready)}, mean {number(summary.ready_mean, '.1f')}"
    waits = f"over half a step: {summary.long_waits} of {summary.batches}"
    return [
        ("loader", Text(f"{ready}   data/compute {number(summary.data_ratio, '.2f')}")),
        ("waits", Text(waits, "bold red" if summary.long_waits * 5 > summary.batches else "")),
    ]


def gauge_rows(sample: Sample, ascii_only: bool) -> list[tuple[str, Text]]:
    """Rows for GPU, CPU, memory and disk; n/a where a gauge is not known."""
    name = f"{escaped(sample.gpu_name)}   " if sample.gpu_name else ""
    celsius = " C" if ascii_only else " °C"
    gpu = (
        f"{name}{number(sample.gpu, '.0f', ' %')}   "
        f"{number(sample.gpu_memory_used, 'GB')} of {number(sample.gpu_memory_total, 'GB')} GB   "
        f"{number(sample.gpu_temperature, '.0f', celsius)}   {number(sample.gpu_power, '.0f', ' W')}"
    )
    cpu = f"{number(sample.cpu, '.0f', ' %')} of {number(len(sample.cores) if sample.cores else None)} cores"
    if sample.cores:
        cpu += f", busiest {max(sample.cores):.0f} %"
    memory = (
        f"{number(sample.memory_used, 'GB')} of {number(sample.memory_total, 'GB')} GB   "
        f"this process {number(sample.rss, 'GB')} GB, {number(sample.open_files)} open files"
    )
    disk = (
        f"read {number(sample.disk_read, '.1f')} MB/s   write {number(sample.disk_write, '.1f')} MB/s   "
        f"busy {number(sample.disk_busy, '.0f', ' %')}"
    )
    everything_unknown = sample.gpu is None and sample.gpu_memory_used is None and not name
    rows = (("GPU", "n/a" if everything_unknown else gpu), ("CPU", cpu), ("memory", memory), ("disk", disk))
    return [(title, Text(text)) for title, text in rows]
