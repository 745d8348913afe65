"""The dashboard: right numbers, drawn when due and not more often, on any kind of terminal."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from rich.console import Console

from fasttrain.dashboard import Dashboard, Lines, duration, line, make_view, number, suits_panel
from fasttrain.dashboard_panel import LivePanel
from fasttrain.errors import SettingsError
from fasttrain.gauges import Sample
from fasttrain.records import PHASES, BatchRecord
from fasttrain.tensorboard import TensorBoardView
from fasttrain.window import WARM_UP, Window

PROJECT = Path(__file__).resolve().parents[1]


def record(step: int = 0, wait: float = 0.02, **changes: Any) -> BatchRecord:
    phases = {"wait": wait, "copy": 0.01, "forward": 0.03, "backward": 0.04, "optimizer": 0.01, "other": 0.01}
    known = {
        "epoch": 1,
        "step": step,
        "time": step * 0.1,
        "wall": sum(phases.values()),
        "images": 64,
        "loss": 1.0,
        "lr": 0.1,
    }
    return BatchRecord(**{**known, **phases, **changes})


def filled(count: int, size: int = 100, **settings: int) -> Window:
    window = Window(size, **settings)
    window.add(record(step) for step in range(WARM_UP + count))
    return window


class Machine:
    latest: Sample | None = Sample(
        cpu=50.0, cores=(90.0, 10.0), memory_used=2 * 10**9, memory_total=8 * 10**9, gpu=12.0, gpu_temperature=61.0
    )


class Tty(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="INFO", format="{message}")
    yield lines
    logger.remove(sink)


# ---- the numbers ----------------------------------------------------------------------------------------------------


def test_shares_medians_and_speed() -> None:
    window = Window(4, world=3)
    window.add([record(wait=5.0)] * WARM_UP)  # left out
    window.add([record(wait=9.0)])  # falls out of the window
    window.add([record(1, wait=0.1), record(2, wait=0.1), record(3, wait=0.1), record(4, wait=0.7)])
    summary = window.summary()
    assert summary is not None
    assert summary.phases["wait"] == pytest.approx((1.0 / 1.4, 0.1))
    assert summary.phases["backward"] == pytest.approx((0.16 / 1.4, 0.04))
    assert sum(share for share, _ in summary.phases.values()) == pytest.approx(1.0)
    assert tuple(summary.phases) == PHASES
    assert summary.wall == pytest.approx(0.2)
    assert summary.images_per_second == pytest.approx(4 * 64 * 3 / 1.4)
    assert (summary.step, summary.batches, summary.steady) == (4, 4, True)


def test_a_long_wait_is_one_over_half_of_the_rest_of_the_step() -> None:
    window = filled(0)
    window.add([record(wait=0.049), record(wait=0.051), record(wait=0.2)])  # the rest takes 0.1 s
    summary = window.summary()
    assert summary is not None
    assert summary.long_waits == 2


def test_the_ratio_of_data_to_compute_comes_from_the_workers_or_else_from_the_wait() -> None:
    for workers, made, expected in ((4, 0.8, 2.0), (0, None, 0.2), (4, None, None)):
        window = filled(0, workers=workers)
        window.add([record(made=made)] * 5)
        summary = window.summary()
        assert summary is not None
        assert summary.data_ratio == (None if expected is None else pytest.approx(expected))


def test_a_loss_that_is_not_a_number_is_seen() -> None:
    window = filled(5)
    window.add([record(loss=math.nan), record(loss=2.0, lr=None)])
    summary = window.summary()
    assert summary is not None
    assert math.isnan(summary.loss_mean or 0)
    assert (summary.loss, summary.lr) == (2.0, 0.1)


def test_warm_up_is_left_out_and_said() -> None:
    assert filled(0).summary() is None
    few, many = filled(5).summary(), filled(30).summary()
    assert few is not None
    assert many is not None
    assert (few.steady, many.steady) == (False, True)


def test_time_left_counts_what_was_done_before_a_resume() -> None:
    window = filled(98)  # with warm-up 100 batches of 0.12 s
    board = Dashboard(5, window, 300, None)
    summary = window.summary()
    assert summary is not None
    assert board.progress.left(window, summary) == pytest.approx(200 * 0.12)
    board.set_total(1000, done=500)
    assert board.progress.left(window, summary) == pytest.approx(400 * 0.12)
    board.set_total(None)
    assert board.progress.left(window, summary) is None


def test_numbers_for_people() -> None:
    assert [duration(seconds) for seconds in (3.6, 252, 3900)] == ["4 s", "4 min 12 s", "1 h 05 min"]
    assert [number(None, ".1f", " %"), number(2.25e9, "GB"), number(99.6, ".0f", " %")] == ["n/a", "2.2", "100 %"]


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_line_at_each_multiple_of_every_but_at_most_one_a_second(said: list[str]) -> None:
    view = Lines(5, Window(100), 100, None)
    told = []
    for number_of_batch in range(1, 41):  # ten batches a second
        view.batches([record(number_of_batch)])
        before = len(said)
        view.draw(number_of_batch / 10)
        if len(said) > before:
            told.append(number_of_batch)
    assert told == [5, 15, 25, 35]
    view.close()
    assert len(said) == 5  # the 40th
    view.drawn(4.0)
    view.close()
    assert len(said) == 5


def test_the_panel_is_redrawn_only_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LivePanel(5, Window(100), 100, None, Console(file=Tty(), force_terminal=True))
    count = 0

    def refresh() -> None:
        nonlocal count
        count += 1

    def draws(now: float) -> bool:
        before = count
        view.draw(now)
        return count > before

    monkeypatch.setattr(view, "_refresh", refresh)
    view.batches([record(step) for step in range(7)])
    assert [draws(now) for now in (1.0, 1.25, 1.5)] == [True, False, False]  # no further multiple of five since
    view.event({"event": "gauges"})
    assert [draws(now) for now in (1.75, 2.0)] == [True, False]
    view.batches([record(step) for step in range(5)])
    assert draws(2.1)
    view.batches([record(step) for step in range(5)])
    assert [draws(now) for now in (2.2, 2.3, 2.35)] == [False, False, True]  # not before a quarter of a second


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("machine", [None, Machine()])
def test_the_panel_fits_eighty_columns_and_any_encoding(encoding: str, machine: Machine | None) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=file, width=80, height=30, force_terminal=True, no_color=True)
    view = LivePanel(5, filled(100, world=2), 1000, machine, console, "runs/[red]x[/red]")
    view.event({"event": "validation", "epoch": 1, "accuracy": 0.75, "time": 1.0})
    console.print(view.render())
    file.flush()
    shown = re.sub(r"\x1b\[[\d;]*m", "", raw.getvalue().decode(encoding))
    assert max(len(row) for row in shown.splitlines()) <= 80
    for expected in (
        *PHASES,
        "1,067 img/s",
        "1 min 48 s left",
        "over half a step: 0 of 100",
        "1.0000, mean 1.0000",
        "accuracy 0.7500",
    ):
        assert expected in shown
    assert "runs/[red]x[/red]" in shown
    assert ("50 % of 2 cores" in shown) == (machine is not None)
    assert "n/a" in shown


def test_the_line_is_plain_ascii_with_all_that_matters() -> None:
    window = filled(100, world=2, workers=2)
    summary = window.summary()
    assert summary is not None
    text = line(summary, Dashboard(5, window, 1000, Machine()))
    assert text.isascii()
    assert text.isprintable()
    for expected in (
        "epoch 2 step 101",
        "102 of 1000 batches",
        "1067 img/s",
        "wait 17%",
        "loss 1.0000",
        "GPU 12%",
        "CPU 50%",
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("file", "width", "environment", "panel"),
    [
        (Tty(), 80, {}, True),
        (Tty(), 50, {}, False),
        (Tty(), 80, {"TERM": "dumb"}, False),
        (Tty(), 80, {"CI": "true"}, False),
        (Tty(), 80, {"NO_COLOR": "1"}, True),
        (io.StringIO(), 80, {}, False),
        (io.StringIO(), 80, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_the_view_suits_the_console(
    file: io.StringIO, width: int, environment: dict[str, str], panel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)
    console = Console(file=file, width=width, height=40)
    assert suits_panel(console) is panel
    assert isinstance(make_view(5, 100, 1, 10, 0, None, console), LivePanel if panel else Lines)


RUN = """
import sys, time
from pathlib import Path
from loguru import logger
from fasttrain import dashboard, logs
from fasttrain.records import BatchRecord, Recorder
with logs.start(Path(sys.argv[1]), 0, "INFO") as log:
    view = dashboard.make_view(5, 100, 1, 40, 0, None, logs.console, "the run")
    with Recorder(Path(sys.argv[1]), 0, time.time(), [view]) as recorder:
        for step in range(40):
            recorder.batch(BatchRecord(0, step, 0.1, 0.12, 0.02, 0.01, 0.03, 0.04, 0.01, 0.01, 64, 1.0, 0.1))
            if step == 20:
                time.sleep(0.6)
                logger.info("a line from the middle of the run, long enough to need more than one row of the terminal")
                print("a print")
                while log._listener._handled < 1:
                    time.sleep(0.01)
        if "raise" in sys.argv:
            raise ValueError("planted")
    logger.info("the end")
"""


def environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "FORCE_COLOR")}
    return {**plain, "PYTHONPATH": str(PROJECT), "TERM": "xterm-256color", "PYTHONUTF8": "1"}


def on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Runs a command on a terminal of 80 x 30; returns its exit status and all it wrote."""
    pty = pytest.importorskip("pty")
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment()) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # Linux: the other side was closed
            pass
    os.close(ours)
    return process.returncode, written.decode()


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_on_a_terminal_the_panel_lives_under_the_log_and_leaves_the_cursor(ending: str, tmp_path: Path) -> None:
    code, written = on_a_terminal([sys.executable, "-c", RUN, str(tmp_path), ending])
    assert code == (ending == "raise")
    assert written.index("\x1b[?25l") < written.index("a line from the middle") < written.rindex("\x1b[?25h")
    last_panel = written[written.rindex("the run") :]
    assert "100%" in last_panel
    assert last_panel.index("╯") < last_panel.index("the end" if ending == "return" else "ValueError: planted")
    assert "a print" in written


def test_in_a_file_it_is_plain_lines_in_order_with_the_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, env=environment(), check=True
    )
    rows = done.stderr.decode("ascii").splitlines()
    assert "\x1b" not in "".join(rows)
    assert [row.split()[2] for row in rows] == ["epoch", "a", "epoch", "the"]
    assert "40 of 40 batches" in rows[2]
    assert "epoch" not in (tmp_path / "rank0.log").read_text()  # the records hold it


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_batches_and_the_validation(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    view = TensorBoardView(tmp_path, world=2)
    view.batches([record(3, loss=1.0), record(4, loss=2.0)])
    view.event({"event": "validation", "epoch": 0, "accuracy": 0.75, "time": 1.0})
    view.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    values = {name: (events.Scalars(name)[0].step, events.Scalars(name)[0].value) for name in events.Tags()["scalars"]}
    assert values["train/loss"] == (4, 1.5)
    assert values["validation/accuracy"] == (4, 0.75)
    assert values["milliseconds/forward"] == (4, pytest.approx(30.0))
    assert values["speed/images_per_second"] == (4, pytest.approx(64 * 2 / 0.12))
    assert "validation/time" not in values


def test_a_missing_tensorboard_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingsError, match=r"dashboard\.tensorboard=true: expected .*pip install tensorboard"):
        TensorBoardView(tmp_path)
