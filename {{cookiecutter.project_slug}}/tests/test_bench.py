"""The two measurements before any advice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import HOME, QUICK, launch


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_step_and_both_are_measured_and_told_apart(images: Path, workers: int) -> None:
    """A step of 150 ms, that no loader of these images takes as long for."""
    stand_in = ("model.name=stand_in", "model.stand_in_ms=150", f"data.path={images}")
    command = [sys.executable, "-m", "fasttrain", "bench", "--seconds", "0.3", "--json", *QUICK, *stand_in]
    code, output = launch([*command, f"data.workers={workers}"], HOME)
    assert code == 0, output
    told = json.loads(output.splitlines()[-1])
    assert told["step_seconds"] >= 0.15
    assert told["both_seconds"] >= 0.15
    assert told["data_ratio"] < 1 < told["images_per_second"] / told["step_images_per_second"]
    assert (told["workers"], told["batch_size"]) == (workers, 6)


def test_a_wrong_setting_is_one_line(images: Path) -> None:
    command = [sys.executable, "-m", "fasttrain", "bench", f"data.path={images}", "data.workers=-1"]
    code, output = launch(command, HOME)
    assert (code, output.count("\n")) == (2, 1), output
