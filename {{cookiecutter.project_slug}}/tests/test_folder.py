"""What is found in an image folder, however it was left there, and how a part is split off."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from fasttrain import folder
from fasttrain.errors import UserError


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The messages logged during the test."""
    found: list[str] = []
    sink = logger.add(lambda message: found.append(message.record["message"]), level="WARNING")
    yield found
    logger.remove(sink)


def touch(root: Path, *names: str) -> None:
    for name in names:
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "wb").close()


def listed(listing: folder.Listing) -> list[tuple[str, int]]:
    return [(os.path.relpath(listing.path(i), listing.root), listing.label(i)) for i in range(len(listing))]


def many(tmp_path: Path, *counts: int) -> folder.Listing:
    for label, count in enumerate(counts):
        touch(tmp_path, *(f"class{label}/{i:04d}.jpg" for i in range(count)))
    return folder.scan(tmp_path)


def test_classes_and_files_come_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    touch(tmp_path, "b/2.jpg", "b/10.JPEG", "a/deep/er/x.Png", "a/y.tiff", "B/z.webp")
    found = folder.scan(tmp_path)
    assert found.classes == ["B", "a", "b"]
    assert listed(found) == [("B/z.webp", 0), ("a/deep/er/x.Png", 1), ("a/y.tiff", 1), ("b/10.JPEG", 2), ("b/2.jpg", 2)]


def test_hidden_and_system_files_are_passed_over_in_silence(tmp_path: Path, warnings: list[str]) -> None:
    touch(tmp_path, "a/1.jpg", "a/._1.jpg", "a/.DS_Store", "a/Thumbs.db", "a/.ipynb_checkpoints/1-checkpoint.jpg")
    touch(tmp_path, "__MACOSX/a/1.jpg", ".git/x.jpg", ".DS_Store", "a/labels.csv")
    assert listed(folder.scan(tmp_path)) == [("a/1.jpg", 0)]
    assert warnings == []


def test_what_is_left_out_is_said(tmp_path: Path, warnings: list[str]) -> None:
    touch(tmp_path, "a/1.jpg", "1.jpg", "2.png", "empty/readme.txt")
    (tmp_path / "a/gone.jpg").symlink_to(tmp_path / "nowhere")
    assert len(folder.scan(tmp_path)) == 1
    assert [re.sub("^.*?: ", "", w) for w in warnings] == [
        "2 images beside the class folders are left out",
        "no images in empty: left out of the classes",
        "1 links that lead nowhere are left out",
    ]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path, "data/a/1.jpg", "elsewhere/2.jpg")
    (tmp_path / "data/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/self").symlink_to(tmp_path / "data/a")
    (tmp_path / "data/b/3.jpg").symlink_to(tmp_path / "data/a/1.jpg")
    assert listed(folder.scan(tmp_path / "data")) == [("a/1.jpg", 0), ("b/2.jpg", 1), ("b/3.jpg", 1)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_named_like_an_image_does_not_block(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg")
    os.mkfifo(tmp_path / "a/2.jpg")
    assert len(folder.scan(tmp_path)) == 1


@pytest.mark.skipif(os.name == "nt", reason="names are UTF-16 there")
def test_any_name_can_be_listed_and_opened(tmp_path: Path) -> None:
    names = ["猫 ü\n/a b.jpg", os.fsdecode(b"\xff\xfe/\xe9.jpg"), "x/" + "n" * 251 + ".jpg"]
    touch(tmp_path, *names)
    found = folder.scan(tmp_path)
    assert sorted(os.fsencode(name) for name, _ in listed(found)) == sorted(map(os.fsencode, names))
    for index in range(3):
        open(found.path(index), "rb").close()
    shown = folder.printable(b"\xff\n\xe7\x8c\xab")
    assert shown == "\\xff\\n猫"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no class folders (it is empty)"),
        (["1.jpg", "2.jpg"], "no class folders (2 images lie directly in it)"),
        (["notes.txt"], "no class folders (1 other files)"),
        (["a/x.heic", "b/.hidden.jpg"], "no images in its 2 folders (a, b)"),
    ],
)
def test_a_folder_without_images_or_classes_is_refused(tmp_path: Path, names: list[str], message: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}: {message}")):
        folder.scan(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read: No such file"):
        folder.scan(tmp_path / "none")


def test_an_index_takes_few_bytes_and_few_objects(tmp_path: Path) -> None:
    found = many(tmp_path, 3000)
    path = len("class0/0000.jpg")
    held = len(found.names) + found.starts.nbytes + found.lengths.nbytes + found.labels.nbytes
    assert held == len(found) * (path + 16)
    assert len(pickle.dumps(found)) < held + 1500  # no object a file: a worker process would copy each
    half = found.subset(np.arange(0, 3000, 2))
    assert half.names is found.names
    assert listed(half) == listed(found)[::2]


def test_a_listing_survives_pickling(tmp_path: Path) -> None:
    found = many(tmp_path, 2, 3)
    assert listed(pickle.loads(pickle.dumps(found))) == listed(found)


def test_labels_follow_the_classes_of_training(tmp_path: Path, warnings: list[str]) -> None:
    found = many(tmp_path, 1, 2).with_classes(["a", "class1", "class0"])
    assert [label for _, label in listed(found)] == [2, 1, 1]
    assert found.classes == ["a", "class1", "class0"]
    assert warnings == [f"{tmp_path}: no images of 1 of the 3 classes (a)"]


def test_a_class_that_training_lacks_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"class1 not among the 1 classes of the training images \(class0\)"):
        many(tmp_path, 1, 2).with_classes(["class0"])


@pytest.mark.parametrize("counts", [(10, 10), (100, 7, 33), (1, 1), (3,), (1, 50), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_a_split_takes_each_image_once_and_the_same_part_of_each_class(
    tmp_path: Path, counts: tuple[int, ...], fraction: float
) -> None:
    found = many(tmp_path, *counts)
    train, val = folder.split(found, fraction, seed=1)
    assert sorted(listed(train) + listed(val)) == listed(found)
    assert len(train) > 0
    assert len(val) > 0
    ideal = np.array(counts) * fraction
    assert (np.abs(np.bincount(val.labels, minlength=len(counts)) - ideal) <= 1.0).all()
    if max(counts) > 1:
        assert len(val) == min(max(round(sum(counts) * fraction), 1), sum(counts) - len(counts))
        assert set(train.labels) == set(range(len(counts)))  # no class is lost to training


def test_a_split_repeats_by_seed(tmp_path: Path) -> None:
    found = many(tmp_path, 40, 40)
    first, again, other = (listed(folder.split(found, 0.25, seed)[1]) for seed in (1, 1, 2))
    assert first == again != other


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 image can't be split .* at least 2"):
        folder.split(many(tmp_path, 1), 0.5, 0)


def test_whole_shows_a_folder_only_once_it_is_done(tmp_path: Path) -> None:
    with folder.whole(tmp_path / "deep/out") as part:
        touch(part, "a")
        assert not (tmp_path / "deep/out").exists()
        made = part.stat().st_ino
    assert (tmp_path / "deep/out").stat().st_ino == made  # renamed, not copied
    assert os.listdir(tmp_path / "deep/out") == ["a"]
    with pytest.raises(FileNotFoundError), folder.whole(tmp_path / "deep/other") as part:
        (part / "a").rename(part / "b")
    assert os.listdir(tmp_path / "deep") == ["out"]


def test_whole_lets_the_first_of_two_win(tmp_path: Path) -> None:
    with folder.whole(tmp_path / "out") as slow:
        touch(slow, "slow")
        with folder.whole(tmp_path / "out") as fast:
            touch(fast, "fast")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(tmp_path / "out") == ["fast"]
