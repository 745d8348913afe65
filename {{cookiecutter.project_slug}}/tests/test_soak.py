"""A training that was killed ends as one that was not: a small one of `make soak`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from soak import Job, differences, soak, untouched


@pytest.fixture(scope="module")
def expected(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, float]:
    return untouched(images, tmp_path_factory.mktemp("soak") / "untouched")


def test_killed_inside_a_save_and_at_random_moments_it_ends_the_same(
    expected: tuple[Job, float], images: Path, tmp_path: Path
) -> None:
    untouched_job, pace = expected
    job = Job(images, tmp_path)
    try:
        soak(job, 3, pace, random.Random(4))  # how many of the random ones hit depends on the machine's speed
        assert (tmp_path / "mark0").exists(), "no kill came inside a save"
        assert differences(untouched_job.run, job.run) == []
    finally:
        job.kill()


def test_a_single_bit_or_sample_is_a_difference(expected: tuple[Job, float], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(expected[0].run, run)
    content = torch.load(run / "last.pt", weights_only=True)
    name, weight = next(iter(content["model"].items()))
    first = (0,) * weight.dim()
    weight[first] = torch.nextafter(weight[first], torch.tensor(9.0))
    torch.save(content, run / "last.pt")
    order = (run / "order1.txt").read_text().splitlines()
    (run / "order1.txt").write_text("\n".join([*order[:-1], f"{order[-1]} 0"]) + "\n")
    found = differences(expected[0].run, run)
    assert f"last.pt: model.{name}" in found
    assert "rank 1: the order of the samples" in found
