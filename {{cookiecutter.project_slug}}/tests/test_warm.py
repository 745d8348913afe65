"""data.warm reads a store where it fits, says why not where it doesn't, and never holds up the training."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from loguru import logger

from fasttrain import host, warm


@pytest.fixture
def said() -> Iterator[list[str]]:
    found: list[str] = []
    sink = logger.add(lambda message: found.append(message.record["message"]), level="INFO")
    yield found
    logger.remove(sink)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/data.mdb").write_bytes(os.urandom(3 * warm.BLOCK + 5))
    return tmp_path / "store"


def test_all_of_a_store_that_fits_is_read(store: Path, said: list[str]) -> None:
    warm.Warming(str(store)).wait()
    assert said[0] == f"data.warm: reading {store}/data.mdb into memory (25 MB)"
    assert said[1].startswith("data.warm: 25 MB read in ")
    assert "stopped" not in said[1]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache can't be asked to forget")
def test_it_is_in_the_page_cache_then(store: Path) -> None:
    file = os.open(store / "data.mdb", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(file):
        pytest.skip("this file system keeps it cached")
    warm.Warming(str(store)).wait()
    assert cached(file)
    os.close(file)


def cached(file: int) -> bool:
    """Whether the last bytes can be read without waiting for the disk."""
    size = os.fstat(file).st_size
    try:
        return os.preadv(file, [bytearray(4096)], size // mmap.PAGESIZE * mmap.PAGESIZE, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"RWF_NOWAIT: {error}")


@pytest.mark.parametrize(
    ("used", "free", "fits"),
    [(0, 10**12, True), (75 * 10**6, 10**12, False), (60 * 10**6, 10**12, True), (0, 20 * 10**6, False)],
)
def test_it_must_fit_what_container_and_machine_have_left(
    store: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, used: int, free: int, fits: bool
) -> None:
    monkeypatch.setattr(host, "memory", lambda: (used, 100 * 10**6))  # a reserve of 10 MB; the store has 25
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    warm.Warming(str(store)).wait()
    assert ("reading" in said[0]) == fits
    if not fits:
        left = min(100 * 10**6 - used, free) // 10**6 - 10
        reason = f"has 25 MB and only {left} MB of memory are to spare: it is read from disk as it is needed"
        assert said == [f"data.warm: {store} {reason}"]


def test_an_image_folder_is_not_read(tmp_path: Path, said: list[str]) -> None:
    with warm.Warming(str(tmp_path)):
        assert len(said) == 1
        assert "is no packed store" in said[0]


def test_off_and_other_processes_of_a_machine_do_nothing(store: Path, said: list[str]) -> None:
    with warm.Warming(str(store), False), warm.Warming(str(store), True, local_rank=1):
        assert said == []


def test_it_neither_blocks_nor_outlives_the_training(
    store: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), open

    def slow(*arguments: Any, **options: Any) -> Any:
        go.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(warm, "open", slow, raising=False)
    with warm.Warming(str(store)) as warming:
        assert any(thread.name == "warm" for thread in threading.enumerate())  # it waits, and we are here
        warming._stop.set()
        go.set()
    assert not any(thread.name == "warm" for thread in threading.enumerate())
    assert said[-1].endswith("(stopped before its end)")


def test_a_file_that_fails_is_told(store: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(warm, "open", fails, raising=False)
    warm.Warming(str(store)).wait()
    assert said[-1] == f"data.warm: {store}/data.mdb can't be read: Input/output error"


def test_a_disk_that_is_stuck_does_not_hold_up_the_end(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "TO_END", 0.1)
    answer, left = threading.Event(), threading.Event()
    monkeypatch.setattr(warm.Warming, "_read", lambda warming, path: answer.wait())

    def train() -> None:
        with warm.Warming(str(store)):
            pass
        left.set()

    threading.Thread(target=train, daemon=True).start()
    ended = left.wait(20)
    answer.set()
    assert ended
