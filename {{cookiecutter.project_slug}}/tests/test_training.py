"""Whole trainings: what is learnt does not depend on how it was run, and what goes wrong ends well."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HOME, QUICK, TIME_LIMIT, Train, launch

from fasttrain.records import PHASES


def weights(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = checkpoint["model"]
    return model


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def test_a_resumed_training_equals_one_that_never_stopped(train: Train) -> None:
    """Four epochs of 11 steps at once, and stopped in the middle of the second and the third; other workers too."""
    settings = ("train.epochs=4", "train.mixup=0.2", "amp=off")
    whole = train("whole", *settings)
    parts = [
        train("parts", *settings, "train.max_steps=17", "resume=auto"),
        train("parts", *settings, "train.max_steps=30", "resume=auto", "data.workers=2"),
        train("parts", *settings, "resume=auto"),
    ]
    assert [run.code for run in (whole, *parts)] == [0, 0, 0, 0], parts[-1].output
    assert "nothing to resume" in parts[0].output
    assert "resumed from" in parts[1].output
    last = parts[-1].checkpoint()
    assert_equal(weights(whole.checkpoint()), weights(last))
    assert [(r["step"], r["loss"], r["lr"]) for r in whole.records()] == [
        (r["step"], r["loss"], r["lr"]) for r in parts[-1].records()
    ]
    assert last["state"]["step"] == 44


def test_metric_and_samples_do_not_depend_on_the_number_of_processes(train: Train) -> None:
    """The same global batch of 6, on a model without batch statistics; 8 validation images do not divide by 3."""
    plain = ("model.name=stand_in", "model.stand_in_ms=0", "amp=off", "data.drop_last=true")
    runs = [train(f"{n}", *plain, f"data.batch_size={6 // n}", processes=n) for n in (1, 2, 3)]
    assert [run.code for run in runs] == [0, 0, 0], runs[-1].output
    (first,) = runs[0].events("validation")
    for run in runs[1:]:
        (other,) = run.events("validation")
        assert other["accuracy"] == first["accuracy"]
        assert other["loss"] == pytest.approx(first["loss"], rel=1e-5)
        for name, value in weights(runs[0].checkpoint()).items():
            torch.testing.assert_close(value, weights(run.checkpoint())[name])


SAYS_IN_WORKERS = """
import os, warnings

original = transform

def transform(image, cfg, train):
    logger.info("said by a worker")
    warnings.warn(f"warned by a worker, process {os.getpid()}")  # the same text is said once, and forks remember
    return original(image, cfg, train)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_trains_however_the_workers_are_started_and_their_words_reach_the_file(
    train: Train, changed_project: Callable[[str, str], Path], method: str
) -> None:
    home = changed_project("data.py", SAYS_IN_WORKERS)
    plain = train("plain", "train.max_steps=3")
    other = train(method, "train.max_steps=3", f"data.start_method={method}", "data.workers=2", home=home)
    assert other.code == 0, other.output
    assert_equal(weights(plain.checkpoint()), weights(other.checkpoint()))
    log = (other.dir / "rank0.log").read_text()
    for words in ("said by a worker", "warned by a worker"):
        assert any(words in line and "worker 1" in line for line in log.splitlines()), log[-2000:]


def test_the_records_tell_waiting_from_computing(train: Train) -> None:
    run = train("stand_in", "model.name=stand_in", "model.stand_in_ms=60", "data.workers=1", "train.max_steps=6")
    assert run.code == 0, run.output
    for record in run.records()[2:]:
        assert record["forward"] >= 0.06
        assert record["wall"] == pytest.approx(sum(record[phase] for phase in PHASES), abs=1e-6)
        assert record["worker"] == 0
    assert [event["name"] for event in run.events("pause")] == ["startup", "validation", "checkpoint"]


def test_batches_and_pauses_equal_an_independent_clock_within_one_percent(train: Train) -> None:
    """The times of the records are the system's clock; the durations are the stopwatch's."""
    settings = ("model.name=stand_in", "model.stand_in_ms=60", "train.epochs=2")
    run = train("clocks", *settings)
    assert run.code == 0, run.output
    first, *rest = run.records()
    pauses = [p["seconds"] for p in run.events("pause") if first["time"] < p["time"] < rest[-1]["time"]]
    assert len(pauses) == 2, "validation and checkpoint of the first epoch"
    measured = sum(record["wall"] for record in rest) + sum(pauses)
    assert measured == pytest.approx(rest[-1]["time"] - first["time"], rel=0.01)


def test_the_run_directory_tells_what_was_run(train: Train) -> None:
    run = train("told", "optimizer.lr=${oc.env:RATE}", RATE="0.0123")
    assert run.code == 0, run.output
    assert 'lr: "${oc.env:RATE}"' in (run.dir / "config.yaml").read_text()
    assert run.checkpoint()["facts"]["settings"]["optimizer"]["lr"] == "${oc.env:RATE}"
    facts = json.loads((run.dir / "run.json").read_text())
    assert facts["versions"]["torch"] == version("torch")
    assert "optimizer.lr=${oc.env:RATE}" in facts["command"]
    assert "0.0123" not in (run.dir / "run.json").read_text()


def test_a_directory_that_holds_a_run_is_not_overwritten(train: Train) -> None:
    first = train("one", "train.max_steps=1")
    before = (first.dir / "best.pt").read_bytes()
    second = train("one", "train.max_steps=1")
    assert second.code == 2
    assert "holds a run already" in second.output
    assert (first.dir / "best.pt").read_bytes() == before


def test_a_setting_refused_at_the_start_leaves_the_directory_free(train: Train) -> None:
    assert train("one", "model.name=resnet81").code == 2
    again = train("one", "train.max_steps=1")
    assert again.code == 0, again.output


def test_a_save_in_the_middle_of_an_accumulated_step_would_lose_gradients(train: Train) -> None:
    """Saved after steps of two batches, stopped in the second epoch, resumed: equal to one that ran through."""
    settings = ("train.epochs=2", "train.accumulate=2", "checkpoint.every_minutes=1e-9", "amp=off")
    whole = train("whole", *settings)
    first = train("parts", *settings, "train.max_steps=8")
    rest = train("parts", *settings, "resume=auto")
    assert (whole.code, first.code, rest.code) == (0, 0, 0), rest.output
    assert_equal(weights(whole.checkpoint()), weights(rest.checkpoint()))
    saves = [e for e in first.events("checkpoint") if e["file"] == "last.pt"]
    assert saves[0]["step"] == 1  # and then after whichever step found that save done


def test_best_is_kept_when_a_resumed_run_is_worse(train: Train) -> None:
    run = train("one", "train.max_steps=2")
    path = run.dir / "last.pt"
    content = torch.load(path, weights_only=True)
    content["state"]["best"] = content["metrics"]["accuracy"] = 2.0  # no accuracy beats it
    torch.save(content, run.dir / "best.pt")
    torch.save(content, path)
    before = (run.dir / "best.pt").read_bytes()
    again = train("one", "resume=auto")
    assert again.code == 0, again.output
    assert "best 2.0" in again.output
    assert (again.dir / "best.pt").read_bytes() == before


def test_evaluate_prints_the_metrics_of_a_checkpoint(train: Train, images: Path) -> None:
    run = train("one", "amp=off")
    command = [sys.executable, "-m", "fasttrain", "evaluate", str(run.dir / "best.pt"), "--json"]
    code, output = launch(command, HOME)
    assert code == 0, output
    told = json.loads(output.splitlines()[-1])
    assert told["images"] == 8
    assert told["accuracy"] == run.events("validation")[-1]["accuracy"]
    code, output = launch([*command, "--split", "all", f"data.path={images / 'train'}"], HOME)
    assert json.loads(output.splitlines()[-1])["images"] == 64
    code, output = launch([*command, "data.batch_size=0"], HOME)
    assert (code, output.count("\n")) == (2, 1), output


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_signal_to_the_whole_group_ends_in_a_line_that_says_how_to_go_on(
    images: Path, tmp_path: Path, number: signal.Signals, code: int, name: str
) -> None:
    run = tmp_path / "run"
    settings = [*QUICK, f"data.path={images}", f"run.dir={run}", "data.workers=2", "train.epochs=100000"]
    command = [sys.executable, str(HOME / "train.py"), *settings]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    ) as process:
        until = time.monotonic() + TIME_LIMIT
        while not (run / "last.pt").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        os.killpg(process.pid, number)
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == code, output
    assert f"stopped by {name}; go on with run.dir={run} resume=auto" in output
    assert "Traceback" not in output + (run / "rank0.log").read_text()
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(process.pid, 0)


RAISES_ON_RANK_1 = """
import os

original = {function}
calls = 0

def failing(*args):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls == 2:
        raise RuntimeError("planted")
    return original(*args)

{function} = failing
"""


@pytest.mark.parametrize("function", ["compute_loss", "compute_metrics"])
def test_a_failing_rank_ends_both_and_its_traceback_is_kept(
    train: Train, changed_project: Callable[[str, str], Path], function: str
) -> None:
    """In the second step, and in validation (the first call asks only for the names of the metrics)."""
    home = changed_project("model.py", RAISES_ON_RANK_1.format(function=function))
    run = train("failing", processes=2, home=home)
    assert run.code != 0
    for text in (run.output, (run.dir / "rank1.log").read_text()):
        assert 'raise RuntimeError("planted")' in text


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.name=resnet81", "nearest: resnet18"),
        ("data.batch_size=0", "at least 1"),
        ("data.path={empty}", "no images"),
    ],
)
def test_what_every_rank_meets_is_said_once_and_last(train: Train, tmp_path: Path, setting: str, says: str) -> None:
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    run = train("wrong", setting.format(empty=tmp_path / "empty"), processes=2)
    assert run.code != 0
    launcher = re.search(r"^[EW]\d{4} .*torch/distributed/elastic", run.output, re.MULTILINE)
    assert launcher is not None, run.output
    ours = run.output[: launcher.start()]
    assert ours.count(says) == 1, run.output
    assert says in ours.rstrip().splitlines()[-1], run.output
    assert "Traceback" not in ours, run.output


def test_a_metric_that_the_model_does_not_give_is_refused_before_training(train: Train) -> None:
    run = train("wrong", "checkpoint.metric=acuracy")
    assert run.code == 2
    assert "one of accuracy, loss" in run.output
    assert not (run.dir / "rank0.jsonl").exists()


def test_weights_start_a_training(train: Train) -> None:
    first = train("first")
    second = train("second", f"model.weights={first.dir / 'best.pt'}", "train.max_steps=1", "optimizer.lr=1e-9")
    assert second.code == 0, second.output
    name = "stem.0.0.weight"
    torch.testing.assert_close(weights(second.checkpoint())[name], weights(first.checkpoint("best.pt"))[name])


def test_every_option_of_the_step_trains(train: Train) -> None:
    run = train(
        "all",
        "train.accumulate=3",
        "train.clip_norm=1.0",
        "train.cutmix=1.0",
        "train.mixup=0.2",
        "train.label_smoothing=0.1",
        "optimizer.name=adamw",
        "optimizer.lr=1e-3",
        "amp=bf16",
        "data.drop_last=true",
        processes=2,
    )
    assert run.code == 0, run.output
    assert "effective batch 36 = 6 x 2 processes x 3 accumulated" in run.output
    assert run.checkpoint()["state"]["step"] == 2  # 5 batches of 12 images: 3 and 2
    assert [record["step"] for record in run.records()] == [1, 1, 1, 2, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_under_records_and_log_costs_only_those(train: Train, tmp_path: Path) -> None:
    directory = tmp_path / "full"
    directory.mkdir()
    for name in ("rank0.jsonl", "events0.jsonl", "rank0.log"):
        (directory / name).symlink_to("/dev/full")
    run = train("full")
    assert run.code == 0, run.output
    assert run.checkpoint()["state"]["epoch"] == 1
    lost = re.search(r"(\d+) records are missing in .*full: .*No space left", run.output)
    assert lost is not None, run.output
    assert int(lost[1]) >= 11  # one a batch, and the events
    assert re.search(r"\d+ log records could not be written to .*rank0.log .*No space left", run.output)
