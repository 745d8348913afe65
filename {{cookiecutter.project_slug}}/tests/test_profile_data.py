"""profile-data: the cost of each step of a sample, the slowest named."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HOME, QUICK, launch

from fasttrain import images
from fasttrain.tools import profile_data
from fasttrain.tools.sample_steps import REST, Timers

SLOW = """
import time

class Stain:
    def __call__(self, pixels):
        time.sleep(0.02)
        return pixels

stain = Stain()
plain = transform

def transform(image, cfg, train):
    return stain(plain(image, cfg, train))
"""


def measured(home: Path, images: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fasttrain", "profile-data", "--json", "--samples", "8", *QUICK, *more]
    code, output = launch([*command, f"data.path={images}"], home)
    assert code == 0, output
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def test_the_owners_slow_transform_is_named(images: Path, changed_project: Callable[[str, str], Path]) -> None:
    found = measured(changed_project("data.py", SLOW), images)
    assert found["slowest"] == "data.py: Stain.__call__"
    names = [step["name"] for step in found["steps"]]
    assert {"read the file", "decode", "crop and resize", "into the batch", "data.py: transform"} <= set(names)
    assert found["steps"][0]["ms"] >= 20
    assert sum(step["share"] for step in found["steps"]) == pytest.approx(1)
    assert sum(step["ms"] for step in found["steps"]) == pytest.approx(found["ms"])
    assert found["images_per_second"] == pytest.approx(found["cores"] / found["ms"] * 1e3)
    assert any("sleep" in each["name"] for each in found["functions"])
    told = profile_data.words(found)
    assert told[0].startswith("Slowest: data.py: Stain.__call__, ")


class Composed:
    """A data set that doesn't know fasttrain, with a transform of a library."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.loader: Any = lambda index: np.full((32, 32, 3), index, np.uint8)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, int]:
        made: Any = self.transform(self.loader(index))
        return made, index


def test_members_of_a_composition_are_told_apart(tmp_path: Path) -> None:
    from torchvision.transforms import v2

    class Slow(v2.Transform):  # type: ignore[misc]  # torchvision isn't typed
        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            time.sleep(0.01)
            return inpt

    compose: Any = v2.Compose
    chain = compose([v2.ToImage(), v2.RandomHorizontalFlip(), Slow()])
    found = profile_data.measure(Composed(chain), 5, 0, tmp_path)
    assert found["slowest"] == "Slow"
    names = {step["name"]: step["calls"] for step in found["steps"]}
    assert {name: names[name] for name in ("ToImage", "RandomHorizontalFlip", "Slow", "Compose")} == dict.fromkeys(
        ("ToImage", "RandomHorizontalFlip", "Slow", "Compose"), 1
    )
    assert names["Composed.loader"] == 1


def test_a_moment_belongs_to_the_innermost_step_and_timers_are_taken_off(tmp_path: Path) -> None:
    timers = Timers()
    inner = timers.wrap(time.sleep, "inner")
    outer = timers.wrap(lambda seconds: inner(seconds), "outer")
    outer(0.02)
    assert timers.seconds["inner"] >= 0.02
    assert timers.seconds["inner"] > timers.seconds["outer"]
    before, dataset = images.load, Composed(list)
    loader = dataset.loader
    with timers.around(dataset, HOME):
        assert images.load is not before
        assert dataset.loader is not loader
    assert images.load is before
    assert dataset.loader is loader
    assert REST not in timers.seconds


def test_a_sample_that_cannot_be_read_is_one_line(images: Path, tmp_path: Path) -> None:
    broken = tmp_path / "data" / "a"
    broken.mkdir(parents=True)
    for name in ("1.jpg", "2.jpg", "3.jpg"):
        (broken / name).write_bytes(b"\xff\xd8nothing")
    command = [sys.executable, "-m", "fasttrain", "profile-data", *QUICK, f"data.path={broken.parent}"]
    code, output = launch(command, HOME)
    assert (code, output.splitlines()[-1].split(":")[0]) == (1, "error"), output
    assert "a/" in output.splitlines()[-1]
