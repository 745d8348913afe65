"""Samples that can't be read, and workers that die: what data.on_error says happens, on every rank alike."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from loguru import logger
from test_feed import Draws, data, seen

from fasttrain import feed as feeding
from fasttrain.errors import SettingsError, UserError
from fasttrain.feed import Feed
from fasttrain.metrics import Means
from fasttrain.worker import lost_worker


class Damaged(Draws):
    """Some of its samples can't be read."""

    def __init__(self, size: int, bad: set[int], error: Exception | None = None) -> None:
        super().__init__(size)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index in self.bad:
            raise self.error or UserError(f"photo{index}.jpg: cut short")
        return super().__getitem__(index)


def make(bad: set[int], workers: int = 0, rank: int = 0, world: int = 1, size: int = 22, **changes: Any) -> Feed:
    settings = data(**{"on_error": "skip", **changes})
    train, val = Damaged(size, bad), Damaged(7, {0, 1, 2, 3, 6} if bad else set())
    place: dict[str, Any] = {"seed": 5, "rank": rank, "world": world, "device": torch.device("cpu")}
    return Feed(train, val, settings, workers=workers, epochs=3, **place)


@pytest.fixture
def said() -> Any:
    lines: list[str] = []
    sink = logger.add(lines.append, format="{message}")
    yield lines
    logger.remove(sink)


@pytest.fixture(params=["slots", "the ordinary way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "slots":
        monkeypatch.setattr(feeding, "_probe", lambda dataset, seed: "a test")


both = pytest.mark.usefixtures("way")


@both
def test_another_sample_takes_its_place_whoever_meets_it() -> None:
    expected = [seen(make({9, 17}).train(epoch)) for epoch in range(2)]
    whole = [seen(make(set()).train(epoch)) for epoch in range(2)]
    for epoch in range(2):
        places = [k for k, (mine, usual) in enumerate(zip(expected[epoch], whole[epoch], strict=True)) if mine != usual]
        assert sorted(whole[epoch][k][0] for k in places) == [9, 17]
        assert not {9, 17} & {sample[0] for sample in expected[epoch]}
    for workers in (1, 2):
        feed = make({9, 17}, workers)
        assert [seen(feed.train(epoch)) for epoch in range(2)] == expected
        feed.close()
    halves = [seen(make({9, 17}, rank=rank, world=2, batch_size=2).train(0)) for rank in range(2)]
    assert len(halves[0]) == len(halves[1])
    assert sorted(halves[0] + halves[1]) == sorted(expected[0])
    (changed,) = [b for b in make({9}).train(0) if b.bad]
    assert 9 not in changed.indices


@both
def test_each_is_named_once_and_counted_each_epoch(said: list[str]) -> None:
    feed = make({9, 17})
    events: list[Any] = []
    feed.tell(lambda kind, /, **fields: events.append((kind, fields)))
    for epoch in range(2):
        list(feed.train(epoch))
    text = "".join(said)
    assert text.count("photo9.jpg: cut short") == text.count("photo17.jpg: cut short") == 1
    assert "epoch 2: 2 of 22 training samples can't be read and were replaced by others" in text
    skipped = [fields for kind, fields in events if kind == "skipped"]
    assert {event["index"] for event in skipped} == {9, 17}
    assert [(event["epoch"], event["count"]) for event in skipped] == [(0, 1), (0, 2), (1, 1), (1, 2)]


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_validation_leaves_them_out(workers: int, said: list[str]) -> None:
    feed = make({9}, workers)
    for _ in range(2):
        batches = list(feed.validation())  # the first of two is of bad samples only
        assert sorted(index for batch in batches for index in batch.indices) == [4, 5]
        assert [batch.tensors[1].tolist() for batch in batches] == [[4, 5]]
    feed.close()
    assert "".join(said).count("photo1.jpg") == 1
    assert "5 of 7 validation samples can't be read and were left out" in said[-1]


def test_no_validation_sample_at_all_is_an_error_not_a_number() -> None:
    with pytest.raises(UserError, match="no validation sample could be read"):
        Means().reduce()


@pytest.mark.parametrize(("bad", "size", "stops"), [(9, 22, False), (10, 101, False), (11, 101, True), (10, 22, True)])
def test_too_many_stop_the_training(bad: int, size: int, stops: bool) -> None:
    feed = make(set(range(bad)), size=size)
    if not stops:
        assert len(list(feed.train(0))) == -(-size // 4)
        return
    with pytest.raises(UserError, match=rf"{max(bad, 10)} of {size} training samples can't be read, .*more than 10%"):
        list(feed.train(0))


def test_nothing_but_bad_samples_is_an_error_soon() -> None:
    with pytest.raises(UserError, match=r"photo\d+.jpg: cut short.*"):
        list(make(set(range(22))).train(0))


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_own_faults_keep_their_traceback(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "PROBES", 1)
    feed = make({9}, workers)
    feed.train_samples.dataset.error = ValueError("a mistake in the data set")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="a mistake in the data set") as caught:
        list(feed.train(0))
    assert workers == 0 or "test_skips.py" in str(caught.value)
    feed.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_keeps_its_exit_code_and_names_the_rank(workers: int) -> None:
    feed = make({9, 8}, workers, rank=1, world=2, on_error="fail")
    feed.train_samples.dataset.error = SettingsError("data.root", "x", "more")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^rank 1: data.root=x: expected more; data.on_error=skip") as caught:
        list(feed.train(0))
    assert caught.value.exit_code == 2
    feed.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("DataLoader worker (pid 71) is killed by signal: Killed. ", "(process 71) was killed by signal Killed; "),
        ("DataLoader worker (pid 71) is killed by signal: Bus error. It is possible", "(docker run --shm-size"),
        ("DataLoader worker (pid 71) exited unexpectedly with exit code 3. Details", "with exit code 3; data"),
        ("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)", "--shm-size"),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_pytorch_says_of_a_dead_worker_becomes_advice(text: str, words: str | None) -> None:
    found = lost_worker(RuntimeError(text))
    assert found is None if words is None else words in str(found)


def test_the_signal_is_found_behind_the_loaders_own_error() -> None:
    outer = RuntimeError("DataLoader worker (pid(s) 71) exited unexpectedly")
    outer.__cause__ = RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. ")
    assert "(process 71) was killed by signal Killed" in str(lost_worker(outer))


DIES = """
import os, time

made = 0

def dying(self, index, whole=Images.unfinished):
    global made
    made += 1
    if made > 8 and torch.utils.data.get_worker_info() and os.environ.get("RANK", "1") == "1":
        time.sleep(0.2)  # the training process is in the forward pass of its first batch
        os.kill(os.getpid(), {number})
    return whole(self, index)

Images.unfinished = dying
"""


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGKILL, 1), (signal.SIGBUS, 1), (signal.SIGKILL, 2)])
def test_a_training_whose_worker_dies_ends_in_one_line(
    train: Train, changed_project: Callable[[str, str], Path], number: int, processes: int
) -> None:
    home = changed_project("data.py", DIES.format(number=int(number)))
    slow = ("model.name=stand_in", "model.stand_in_ms=400")
    run = train("dies", "data.workers=1", *slow, home=home, processes=processes)
    assert run.code != 0
    assert "loader worker (process" in run.output, run.output
    assert "killed by signal" in run.output
    assert "Traceback" not in (run.dir / f"rank{processes - 1}.log").read_text()


@pytest.fixture
def damaged(images: Path, tmp_path: Path) -> Path:
    """One training and one validation image cut in half, another of 0 bytes."""
    root = tmp_path / "damaged"
    shutil.copytree(images, root)
    for part in ("train", "val"):
        file = sorted((root / part).rglob("*.jpg"))[3]
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    sorted((root / "train").rglob("*.jpg"))[40].write_bytes(b"")
    return root


def test_damaged_files_are_skipped_by_every_rank_alike(train: Train, damaged: Path) -> None:
    plain = ("model.name=stand_in", "model.stand_in_ms=0", "amp=off", "data.on_error=skip", f"data.path={damaged}")
    one = train("one", *plain, "data.workers=2")
    two = train("two", *plain, "data.batch_size=3", processes=2)
    assert (one.code, two.code) == (0, 0), one.output + two.output
    (first,), (other,) = one.events("validation"), two.events("validation")
    assert other["accuracy"] == first["accuracy"]
    assert {event["kind"] for event in one.events("skipped")} == {"training", "validation"}
    assert "is empty (0 bytes)" in one.output
    assert "1 of 8 validation samples can't be read and were left out" in one.output
    for name, value in one.checkpoint()["model"].items():
        torch.testing.assert_close(value, two.checkpoint()["model"][name])


def test_a_damaged_file_ends_the_training_by_name(train: Train, damaged: Path) -> None:
    run = train("fails", f"data.path={damaged}", processes=2)
    assert run.code != 0
    (line,) = (line for line in run.output.splitlines() if " CRITICAL " in line)
    assert "rank " in line, run.output
    assert "data.on_error=skip" in line
    assert "cut off" in line or "is empty" in line
    assert "Traceback" not in (run.dir / "rank0.log").read_text()
