"""What saving a checkpoint costs a training: the stall of a save, and the speed of the loop while it is written.

    python benchmarks/saving.py                       a state of 500 MB, 7 rounds
    python benchmarks/saving.py --megabytes 2000 --folder /mnt/disk

In each round, one after the other: `torch.save` of a state into a file, as a training would do it in its loop; the
same state saved by the template (fasttrain/writer.py: a copy into memory, another process writes); then training
steps of one thread, before it while nothing is saved, while that save is being written, and again after it. The speed
meanwhile is that over the mean of before and after. Medians over the rounds. The stall of the first save, with its
page faults, is not left out: memory is prepared before, as it is after the first step of a training.
Prints a table, and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROJECT = Path(__file__).resolve().parents[1] / "{{cookiecutter.project_slug}}"


def make_state(megabytes: float) -> dict[str, Any]:
    """Weights in 60 layers and their momenta, as SGD has them."""
    layers, numbers = 60, int(megabytes * 1e6 / 4 / 2 / 60)
    model = {f"layer{i}.weight": torch.randn(numbers) for i in range(layers)}
    momenta = {i: {"momentum_buffer": torch.randn(numbers)} for i in range(layers)}
    return {"model": model, "optimizer": {"state": momenta, "param_groups": []}}


def make_step() -> Callable[[], None]:
    """A training step of a small convolutional network, a few milliseconds on one thread."""
    channels = [(3, 16), (16, 32), (32, 32)]
    parts = [nn.Sequential(nn.Conv2d(a, b, 3, stride=2), nn.BatchNorm2d(b), nn.ReLU()) for a, b in channels]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(32, 3, 64, 64), torch.randint(10, (32,))

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_a_second(step: Callable[[], None], goes_on: Callable[[float], bool]) -> float:
    """Steps, until `goes_on` (it gets the seconds so far) says no."""
    began, count = time.perf_counter(), 0
    while goes_on(time.perf_counter() - began):
        step()
        count += 1
    return count / (time.perf_counter() - began)


def measure(megabytes: float, rounds: int, folder: Path) -> list[dict[str, float]]:
    from fasttrain.writer import Writer

    state, step = make_state(megabytes), make_step()
    writer = Writer(folder, torch.device("cpu"))
    writer.prepare(state)
    writer.wait()
    for _ in range(30):
        step()
    found = []
    length = 1.0  # seconds of the steps before and after a save
    answers: list[dict[str, Any]] = []
    try:
        for _ in range(rounds):
            began = time.perf_counter()
            torch.save(state, folder / "plain.pt")
            plain = time.perf_counter() - began
            os.sync()  # what it left for later is not to disturb the rest

            before = steps_a_second(step, lambda seconds, length=length: seconds < length)  # type: ignore[misc]
            began = time.perf_counter()
            writer.save(state, [("last.pt", None)], answers.append)
            stall = time.perf_counter() - began
            while_saving = steps_a_second(step, lambda seconds: writer.busy)
            written = answers[-1]["last.pt"]["seconds"]
            length = max(1.0, written)
            after = steps_a_second(step, lambda seconds, length=length: seconds < length)  # type: ignore[misc]
            row = {"plain": plain, "stall": stall, "written": written}
            found.append({**row, "ratio": stall / plain, "speed": while_saving / statistics.mean((before, after))})
    finally:
        writer.close(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=500, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--project", type=Path, default=PROJECT, help="a generated project, or the template's folder")
    options = parser.parse_args()
    sys.path.insert(0, str(options.project))
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # two cores: one for the training, one for whatever else there is
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options.megabytes, options.rounds, Path(folder))
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print("          torch.save  stall of a save  of torch.save  written in   speed meanwhile")
    for name, row in [*((f"round {n + 1}", row) for n, row in enumerate(rows)), ("median", medians)]:
        print(
            f"{name:9} {row['plain'] * 1e3:7.0f} ms {row['stall'] * 1e3:13.0f} ms {row['ratio']:14.3f} "
            f"{row['written'] * 1e3:9.0f} ms {row['speed']:16.3f}"
        )
    print(json.dumps({"benchmark": "saving", "megabytes": options.megabytes, "rounds": options.rounds, **medians}))


if __name__ == "__main__":
    main()
