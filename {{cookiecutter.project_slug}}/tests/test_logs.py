"""Logging: nothing is lost at any ending, everything reaches the rank's file, and a failing sink stops nothing."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from conftest import HOME
from loguru import logger

from fasttrain import logs
from fasttrain.errors import UserError
from fasttrain.sinks import LineFile

PROJECT = Path(__file__).resolve().parents[1]
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, an always full disk")

ENDINGS = """
import logging, os, signal, sys, threading, time
from pathlib import Path
from loguru import logger
from fasttrain import logs

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(0.002)

def terminate(*_):
    raise SystemExit(143)

def work(ending):
    for number in range(300):
        logger.info("line {}", number)
    if ending == "exit":
        sys.exit(3)
    if ending == "raise":
        raise ValueError("planted")
    if ending in ("SIGTERM", "SIGINT"):
        os.kill(os.getpid(), getattr(signal, ending))
        time.sleep(60)
    if ending == "impatient":  # two signals while the queue drains
        def interrupt():
            for _ in range(2):
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=interrupt, daemon=True).start()

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    log = logs.start(Path(sys.argv[1]), int(sys.argv[3]), "INFO", handlers=[Slow()])
    ending, _, style = sys.argv[2].partition("-")
    if style == "bare":  # without the with block: the interpreter's exit has to drain
        work(ending)
    else:
        with log:
            work(ending)
"""

SAID = ("from loguru", "some.library: from logging", r".*UserWarning: from warnings", ".*uncaught exception")
WORKERS = """
import logging, multiprocessing, sys, threading, warnings
from pathlib import Path
from loguru import logger
from fasttrain import logs

def work(worker_log, worker_id):
    worker_log.start(worker_id)
    logger.info("from loguru")
    logging.getLogger("some.library").warning("from logging")
    warnings.warn("from warnings")
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def keep_logging(stop):
    while not stop.wait(0.0005):
        logger.info("meanwhile")

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    stop = threading.Event()
    with logs.start(Path(sys.argv[1]), 0, "INFO") as log:
        busy = threading.Thread(target=keep_logging, args=(stop,))
        busy.start()
        workers = [context.Process(target=work, args=(log.worker_log(), number)) for number in range(int(sys.argv[3]))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stop.set()
        busy.join()
        assert [worker.exitcode for worker in workers] == [0] * len(workers)
"""


def run(script: str, tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(script)
    command = [sys.executable, str(file), str(tmp_path / "run"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("impatient", 143),
        ("return", 0),
        ("exit", 3),
        ("raise", 1),
        ("SIGTERM", 143),
        ("SIGINT", -2),
        ("return-bare", 0),
        ("raise-bare", 1),
    ],
)
def test_no_line_is_lost_at_any_ending(ending: str, code: int, tmp_path: Path) -> None:
    done = run(ENDINGS, tmp_path, ending, 0)
    text = (tmp_path / "run" / "rank0.log").read_text()
    assert done.returncode == code, done.stderr
    assert re.findall(r"INFO +rank 0 \| line (\d+)\n", text) == [str(number) for number in range(300)]
    assert done.stderr.count("INFO     line") == 300
    if ending.startswith("raise"):
        for written in (text, done.stderr):
            assert written.count("Traceback (most recent call last)") == 1
            assert written.count("\nValueError: planted") == 1
    if ending.startswith("SIG"):
        assert "in work" in text  # where it was when the signal came


def test_other_ranks_print_only_what_ends_them(tmp_path: Path) -> None:
    done = run(ENDINGS, tmp_path, "raise", 3)
    assert "line 299" in (tmp_path / "run" / "rank3.log").read_text()
    lines = done.stderr.splitlines()
    assert lines[-1] == "rank 3 | ValueError: planted"
    assert all(line.startswith("rank 3 | ") for line in lines)
    assert "line 299" not in done.stderr


@pytest.mark.parametrize(("method", "count"), [("fork", 20), ("spawn", 2), ("forkserver", 2)])
def test_all_that_a_worker_says_reaches_the_file(method: str, count: int, tmp_path: Path) -> None:
    done = run(WORKERS, tmp_path, method, count)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "rank0.log").read_text()
    for number in range(count):
        for said in SAID:
            assert len(re.findall(rf"rank 0 worker {number} \| {said}", text)) == 1, (number, said)
    assert text.count("ZeroDivisionError") == count


def test_a_fork_that_does_not_start_worker_logging_still_reaches_the_file(tmp_path: Path) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    with logs.start(tmp_path, 0, "INFO"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking with threads
        child = os.fork()
        if child == 0:
            logger.info("from the child")
            os._exit(0)
        os.waitpid(child, 0)
    assert "from the child" in (tmp_path / "rank0.log").read_text()


def test_logging_warnings_and_threads_reach_the_file_and_all_is_put_back(tmp_path: Path) -> None:
    def hooks() -> list[object]:
        root = logging.root
        return [sys.excepthook, threading.excepthook, warnings.showwarning, root.level, list(root.handlers)]

    quiet = logging.getLogger("like.torch")  # prints on its own and passes nothing on
    own = logging.StreamHandler(sys.stderr)
    quiet.addHandler(own)
    quiet.propagate = False
    before = hooks()
    with logs.start(tmp_path, 0, "INFO") as log:
        logging.getLogger("library").info("through %s", "logging")
        quiet.warning("through a logger like torch's")
        warnings.warn("through warnings", stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0, name="reader")
        thread.start()
        thread.join()
    log.close()
    text = (tmp_path / "rank0.log").read_text()
    assert "library: through logging" in text
    assert text.count("like.torch: through a logger like torch's") == 1
    assert "UserWarning: through warnings" in text
    assert re.search(r"reader ended with an uncaught exception\nTraceback .*ZeroDivisionError", text, re.DOTALL)
    assert hooks() == before
    assert quiet.handlers == [own]


def test_text_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "[red]a[/red] {} <red>b</red> %s \x1b[2J\r\x07 é"
    with logs.start(tmp_path, 0, "INFO"):
        logger.info(hostile)
    shown = "[red]a[/red] {} <red>b</red> %s \\x1b[2J\\x0d\\x07 é"
    assert capsys.readouterr().err.rstrip().endswith(shown)
    assert shown in (tmp_path / "rank0.log").read_text(encoding="utf-8")


def test_a_user_error_is_one_line_and_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("data.path: no such folder")
    with pytest.raises(UserError), logs.start(tmp_path, 0, "INFO"):
        raise error
    assert logs.reported(error)
    assert capsys.readouterr().err.splitlines()[-1].endswith("CRITICAL data.path: no such folder")
    assert (tmp_path / "rank0.log").read_text().count("\n") == 1


class Failing(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(28, "No space left on device")


def test_a_failing_sink_is_counted_and_said_once(tmp_path: Path) -> None:
    failing = Failing()
    failing.set_name("the third sink")
    with logs.start(tmp_path, 0, "INFO", handlers=[failing]):
        for number in range(50):
            logger.info("line {}", number)
    text = (tmp_path / "rank0.log").read_text()
    assert len(re.findall(r"\| line \d+", text)) == 50
    assert text.count("can't write to the third sink") == 1
    assert "50 log records could not be written to the third sink" in text


@needs_full_disk
def test_a_full_disk_is_said_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    with logs.start(tmp_path, 0, "INFO"):
        for number in range(50):
            logger.info("line {}", number)
    shown = capsys.readouterr().err
    assert shown.count("line") >= 50
    assert shown.count("can't write to") == 1
    assert "50 log records could not be written" in shown


def test_a_directory_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't write .*rank0\.log: .*choose another run\.dir"):
        logs.start(tmp_path / "file" / "run", 0, "INFO")


def test_the_next_writer_leaves_a_torn_line_alone(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("whole\nto")
    file = LineFile(tmp_path / "lines")
    assert file.write(["next\n", "last\n"]) == 0
    file.close()
    assert (tmp_path / "lines").read_text() == "whole\nto\nnext\nlast\n"


def test_lines_before_the_run_directory_have_the_same_form() -> None:
    code = "from fasttrain import logs; from loguru import logger; logs.early('INFO'); logger.info('a line')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO     a line\n", done.stderr)
