"""profile.steps: torch.profiler over some batches of a training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Train

from fasttrain import profile
from fasttrain.clock import HostClock
from fasttrain.errors import SettingsError
from fasttrain.evidence import side_of
from fasttrain.history import Rank
from fasttrain.records import BatchRecord
from fasttrain.transfer import Batch


def test_a_table_and_a_trace_of_the_steps_that_were_asked_for(train: Train) -> None:
    run = train("profiled", "profile.steps=2", "profile.start=3", "train.max_steps=6", "profile.ranks=[1]", processes=2)
    assert run.code == 0, run.output
    assert not (run.dir / "profile0.txt").exists()
    assert "aten::convolution_backward" in (run.dir / "profile1.txt").read_text()
    trace = json.loads(gzip.decompress((run.dir / "trace1.json.gz").read_bytes()))["traceEvents"]
    assert {"step 4", "step 5"} <= {event.get("name") for event in trace}
    assert {"wait", "forward", "backward", "optimizer", "other"} <= {event.get("name") for event in trace}
    assert not {"step 3", "step 6"} & {event.get("name") for event in trace}
    events = [json.loads(line) for line in (run.dir / "events1.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "profile"]
    assert [(event["first_step"], event["last_step"]) for event in told] == [(4, 5)]
    inside = [row["step"] for row in run.records(1) if told[0]["begin"] < row["time"] < told[0]["end"]]
    assert inside == [4, 5]
    assert [event["name"] for event in events if event["event"] == "pause"].count("profile") == 2
    assert [row["step"] for row in run.records(1)] == [1, 2, 3, 4, 5, 6]


class Sink:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.records = 0

    def batch(self, record: Any) -> None:
        self.records += 1

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append(kind)


class Streams:
    """Plays the streams of a device."""

    def copy(self, tensors: Any) -> Any:
        return tensors.clone()


def profiling() -> bool:
    return bool(vars(torch.autograd)["_profiler_enabled"]())


def watch(folder: Path, streams: Any, steps: int = 2, start: int = 0) -> tuple[profile.ProfilingWatch, Sink]:
    sink = Sink()
    where = {"directory": folder, "rank": 0, "steps": steps, "start": start, "streams": streams}
    return profile.ProfilingWatch(sink, HostClock(), 0.0, 0.0, **where), sink


def batches(count: int) -> list[Batch]:
    return [Batch(torch.ones(2), [0, 1], 0, i, count - 1, 0, 0.0, None) for i in range(count)]


def test_copies_to_the_device_have_a_name_in_the_trace(tmp_path: Path) -> None:
    streams = Streams()
    watched, _ = watch(tmp_path, streams)
    for batch in watched.batches(batches(4)):
        streams.copy(batch.tensors)
    watched.close()
    trace = json.loads(gzip.decompress((tmp_path / "trace0.json.gz").read_bytes()))["traceEvents"]
    assert sum(event.get("name") == profile.COPY for event in trace) == 2
    assert "copy" not in vars(streams)


def test_a_run_that_ends_early_leaves_what_there_is(tmp_path: Path) -> None:
    watched, sink = watch(tmp_path, None, steps=50, start=1)
    for batch in watched.batches(batches(3)):
        batch.tensors.add_(1)
    watched.close()
    assert "aten::add_" in (tmp_path / "profile0.txt").read_text()
    assert (sink.records, sink.events.count("profile")) == (3, 1)


def test_a_training_that_fails_leaves_no_profiler_running(tmp_path: Path) -> None:
    watched, sink = watch(tmp_path, None, steps=50)
    for _ in watched.batches(batches(3)):
        assert profiling()
        break
    watched.abandon()
    assert not profiling()
    assert sink.records == 1
    watched, _ = watch(tmp_path, None, start=1)
    loop = watched.batches(batches(3))
    next(loop)
    watched.abandon()  # in the batch after which the profile was to begin
    assert not profiling()


def test_a_profile_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "profile0.txt").mkdir()
    watched, sink = watch(tmp_path, None)
    assert len(list(watched.batches(batches(5)))) == 5
    watched.close()
    assert sink.records == 5


@pytest.mark.parametrize("ranks", [[], [2], [0, 7]])
def test_ranks_that_there_are_not_are_refused(ranks: list[int]) -> None:
    with pytest.raises(SettingsError, match=r"profile\.ranks=.* ranks from 0 to 1"):
        profile.wanted(SimpleNamespace(steps=1, ranks=ranks), 0, 2)
    assert profile.wanted(SimpleNamespace(steps=None, ranks=ranks), 0, 2) is False


def test_profiled_batches_are_not_judged() -> None:
    records = [BatchRecord(0, i, float(i), 0.6, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 4) for i in range(40)]
    told = {"event": "profile", "time": 20.0, "begin": 9.5, "end": 19.5}
    steps = [record.step for record in side_of(Rank(0, records, [told])).records]
    assert steps == [step for step in range(40) if not 10 <= step <= 19]
