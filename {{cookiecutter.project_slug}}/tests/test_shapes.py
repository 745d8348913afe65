"""The demo's images: the same for a seed, whole or not there, and what an image folder should be."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from fasttrain import folder, shapes


def digest(root: Path) -> str:
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(str(p.relative_to(root)).encode() + p.read_bytes() for p in files)).hexdigest()


def size(path: str) -> tuple[int, int]:
    image = cv2.imread(path)
    assert image is not None
    height, width = image.shape[:2]
    return height, width


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shapes.draw(tmp_path / name, seed, 2, 1)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_it_is_an_image_folder_of_varied_size(tmp_path: Path) -> None:
    shapes.draw(tmp_path / "s", 0, 6, 3)
    train, val = folder.scan(tmp_path / "s/train"), folder.scan(tmp_path / "s/val")
    assert train.classes == val.classes == list(shapes.CLASSES)
    assert (len(train), len(val)) == (48, 24)
    sides = [size(train.path(i)) for i in range(len(train))]
    assert len(set(sides)) > 40
    assert all(shapes.SIDES[0] <= side <= shapes.SIDES[1] for pair in sides for side in pair)


def test_training_and_validation_share_no_image(tmp_path: Path) -> None:
    shapes.draw(tmp_path / "s", 0, 5, 5)
    contents = [p.read_bytes() for p in (tmp_path / "s").rglob("*.jpg")]
    assert len(set(contents)) == len(contents) == 80


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cv2.imencode
    calls: list[int] = []

    def fails_later(*args: Any) -> tuple[bool, NDArray[np.uint8]]:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(cv2, "imencode", fails_later)
    with pytest.raises(KeyboardInterrupt):
        shapes.draw(tmp_path / "s", 0, 2, 1)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_draw_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=shapes.draw, args=(tmp_path / "s", 0, 4, 2)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert len(list((tmp_path / "s").rglob("*.jpg"))) == 48


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    shapes.draw(tmp_path / "s", 0, 1, 1)
    assert list((tmp_path / "s").iterdir()) == []
