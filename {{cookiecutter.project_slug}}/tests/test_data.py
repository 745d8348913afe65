"""From a setting to samples, and from a batch to what the network takes."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import random
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, NoReturn

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import data
from config import Config, Data
from fasttrain import images, settings, shapes
from fasttrain.errors import UserError

HERE = Path(data.__file__).parent


@functools.cache
def defaults() -> Data:
    return settings.load(Config, HERE / "config.yaml", [])[0].data


def config(path: str | Path, **values: Any) -> Data:
    return dataclasses.replace(defaults(), path=str(path), **{"image_size": 24, "root": str(path), **values})


def photos(root: Path, *names: str) -> None:
    """Images whose single colour is the number of their place in `names`."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / name), np.full((40, 50, 3), number, np.uint8))


def numbers(dataset: data.Images | data.Arrays) -> list[int]:
    return [int(dataset[i][0].mean().round()) for i in range(len(dataset))]


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_train_and_val_are_taken_as_they_are(tmp_path: Path, val: str) -> None:
    photos(tmp_path, "train/a/1.png", "train/b/2.png", f"{val}/b/3.png")
    sets = data.build(config(tmp_path), 0)
    assert sets.classes == ["a", "b"]
    assert (numbers(sets.train), numbers(sets.val)) == ([0, 1], [2])
    assert sets.val[0][1] == 1  # b, though val has no a


@pytest.mark.parametrize("inside", ["", "train/"])
def test_a_part_is_split_off_where_there_is_no_val(tmp_path: Path, inside: str) -> None:
    photos(tmp_path, *(f"{inside}{c}/{i}.png" for c in "ab" for i in range(10)))
    sets = data.build(config(tmp_path, val_fraction=0.2), 3)
    assert (len(sets.train), len(sets.val)) == (16, 4)
    assert sorted(numbers(sets.train) + numbers(sets.val)) == list(range(20))
    assert numbers(data.build(config(tmp_path, val_fraction=0.2), 3).val) == numbers(sets.val)
    for name in ("train", "val"):
        part = data.build_split(config(tmp_path, val_fraction=0.2), 3, name, ["a", "b"])
        assert numbers(part) == numbers(getattr(sets, name))


def test_a_class_may_be_called_valid(tmp_path: Path) -> None:
    photos(tmp_path, *(f"{c}/{i}.png" for c in ("expired", "valid") for i in range(4)))
    sets = data.build(config(tmp_path), 0)
    assert sets.classes == ["expired", "valid"]
    assert len(sets.train) + len(sets.val) == 8


def test_a_class_of_val_that_training_lacks_is_an_error_by_name(tmp_path: Path) -> None:
    photos(tmp_path, "train/a/1.png", "val/zebra/1.png")
    with pytest.raises(UserError, match="zebra"):
        data.build(config(tmp_path), 0)


def test_evaluation_labels_by_the_classes_of_the_checkpoint(tmp_path: Path) -> None:
    photos(tmp_path, "a/1.png", "c/2.png", "c/3.png")
    found = data.build_split(config(tmp_path), 0, "all", ["c", "b", "a"])
    assert sorted(found[i][1] for i in range(3)) == [0, 0, 2]
    with pytest.raises(UserError, match=r"\bc not among"):
        data.build_split(config(tmp_path), 0, "all", ["a", "b"])


def test_evaluation_takes_the_test_folder(tmp_path: Path) -> None:
    photos(tmp_path, "train/a/1.png", "val/a/2.png", "test/a/3.png")
    assert numbers(data.build_split(config(tmp_path), 0, "test", ["a"])) == [2]
    with pytest.raises(UserError, match="divided already"):
        data.build_split(config(tmp_path), 0, "all", ["a"])
    with pytest.raises(UserError, match="expected train, val, test or all"):
        data.build_split(config(tmp_path), 0, "tset", ["a"])


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    photos(tmp_path, "a/1.png", "a/2.png")
    with pytest.raises(UserError, match=r"split=test: there is no folder .*test"):
        data.build_split(config(tmp_path), 0, "test", ["a"])


def test_evaluation_does_not_augment(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    photos(tmp_path, "a/1.png")
    cv2.imwrite(str(tmp_path / "a/1.png"), rng.integers(0, 256, (60, 60, 3), dtype=np.uint8))
    found = data.build_split(config(tmp_path), 0, "all", ["a"])
    assert all((found[0][0] == found[0][0]).all() for _ in range(5))


def test_augmentation_repeats_with_the_state_of_pythons_generator(tmp_path: Path) -> None:
    photos(tmp_path, "train/a/1.png", "val/a/1.png")
    cv2.imwrite(str(tmp_path / "train/a/1.png"), np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    train = data.build(config(tmp_path), 0).train

    def draws(seed: int) -> NDArray[np.uint8]:
        random.seed(seed)
        return np.stack([train[0][0] for _ in range(6)])

    assert (draws(1) == draws(1)).all()
    assert not (draws(1) == draws(2)).all()
    assert len({d.tobytes() for d in draws(1)}) == 6


def test_flip_is_the_chance_of_a_mirrored_image(tmp_path: Path) -> None:
    photos(tmp_path, "train/a/1.png", "val/a/1.png")
    cv2.imwrite(str(tmp_path / "train/a/1.png"), np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    plain, mirrored = (
        data.build(config(tmp_path, flip=chance, crop_scale=[1.0, 1.0]), 0).train[0][0] for chance in (0.0, 1.0)
    )
    assert (mirrored == plain[:, ::-1]).all()
    assert not (mirrored == plain).all()


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_a_sample_is_the_same_in_a_place_of_its_own_and_in_the_batch(tmp_path: Path, flip: float, train: bool) -> None:
    photos(tmp_path, "train/a/1.png", "val/a/1.png")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "train/a/1.png"), pixels)
    cfg = config(tmp_path, flip=flip)
    files = data.Images(data.build(cfg, 0).train.listing, cfg, train)  # type: ignore[union-attr]
    for dataset in (files, data.Arrays(pixels[None], [0], cfg, train)):
        place = np.zeros((24, 24, 3), np.uint8)
        random.seed(3)
        crop, label = dataset.unfinished(0)
        assert isinstance(crop, images.Crop)
        crop.write(place)
        random.seed(3)
        assert (place == dataset[0][0]).all()
        assert label == 0


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    photos(tmp_path, "train/a/1.png", "val/a/1.png")
    (tmp_path / "train/a/1.png").write_bytes(b"")
    train = data.build(config(tmp_path), 0).train
    with pytest.raises(images.ImageError, match=r"train/a/1\.png: is empty"):
        train[0]
    (tmp_path / "train/a/1.png").unlink()
    with pytest.raises(images.ImageError, match=r"train/a/1\.png: can't be read"):
        train[0]


def test_the_demo_draws_its_images_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shapes.draw
    monkeypatch.setattr(shapes, "draw", lambda root: real(root, 0, 3, 2))
    cfg = config("shapes", root=str(tmp_path))
    sets = data.build(cfg, 0)
    assert (len(sets.train), len(sets.val)) == (24, 16)
    before = sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.jpg"))
    assert len(data.build(cfg, 0).train) == 24
    assert sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.jpg")) == before


def idx(pixels: NDArray[np.uint8]) -> bytes:
    return struct.pack(">HBB", 0, 8, pixels.ndim) + struct.pack(f">{pixels.ndim}I", *pixels.shape) + pixels.tobytes()


FASHION = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)


def fashion(root: Path, count: int = 6) -> None:
    raw = root / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(FASHION[:count]))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8)))


def test_a_local_copy_of_a_known_data_set_is_used_where_it_lies(tmp_path: Path) -> None:
    fashion(tmp_path)
    cfg = config("fashion_mnist", root=str(tmp_path), image_size=28)
    sets = data.build(cfg, 0)
    assert (len(sets.train), len(sets.val), sets.classes[2]) == (5, 1, "Pullover")
    parts = {split: data.build_split(cfg, 0, split, sets.classes) for split in ("train", "val", "test")}
    labels = {split: [part[i][1] for i in range(len(part))] for split, part in parts.items()}
    assert sorted(labels["train"] + labels["val"]) == labels["test"] == list(range(6)), "val is a part of train"
    assert labels["val"] == [sets.val[0][1]]
    pixels, label = parts["test"][2]
    assert label == 2
    assert (pixels == FASHION[2][:, :, None]).all()  # gray in all three channels, not augmented


def test_without_network_and_copy_the_error_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*args: object, **kwargs: object) -> NoReturn:
        raise OSError("Network is\nunreachable")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    for name, place in (("fashion_mnist", "FashionMNIST/raw"), ("cifar10", "cifar-10-python.tar.gz")):
        with pytest.raises(UserError, match=f"data.path={name}: .*{place}") as caught:
            data.build(config(name, root=str(tmp_path)), 0)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("left", [0, 3, 10, 500])
@pytest.mark.parametrize("kind", ["images-idx3", "labels-idx1"])
def test_a_copy_that_is_cut_off_is_an_error_in_one_line(tmp_path: Path, left: int, kind: str) -> None:
    fashion(tmp_path)
    file = tmp_path / f"FashionMNIST/raw/train-{kind}-ubyte"
    file.write_bytes(file.read_bytes()[: min(left, file.stat().st_size - 1)])
    with pytest.raises(UserError, match=r"data\.path=fashion_mnist"):
        data.build(config("fashion_mnist", root=str(tmp_path)), 0)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_samples_come_through_worker_processes(tmp_path: Path, method: str) -> None:
    photos(tmp_path, *(f"{part}/{c}/{i}.png" for part in ("train", "val") for c in "ab" for i in range(2)))
    val = data.build(config(tmp_path), 0).val
    assert len(pickle.dumps(val)) < 5000
    pixels, labels = next(iter(DataLoader(val, 4, num_workers=1, multiprocessing_context=method)))
    assert (pixels.dtype, tuple(pixels.shape), labels.tolist()) == (torch.uint8, (4, 24, 24, 3), [0, 0, 1, 1])


def batch(count: int = 6, size: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8), torch.arange(count) % 4


def test_prepare_is_the_plain_formula_in_channels_last() -> None:
    pixels, labels = batch()
    cfg = config("x")
    out, same = data.Prepare(cfg, 4, torch.device("cpu"))(pixels, labels, training=True)
    expected = (pixels.permute(0, 3, 1, 2).float() / 255 - torch.tensor(cfg.mean).view(3, 1, 1)) / torch.tensor(
        cfg.std
    ).view(3, 1, 1)
    assert torch.allclose(out, expected, atol=1e-5)
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert same is labels


@pytest.mark.parametrize(
    ("alphas", "least", "most"),
    [((0.4, 0.0), 0, 0), ((0.0, 1.0), 35, 40), ((0.4, 1.0), 8, 32)],
    ids=["mixup", "cutmix", "both"],
)
def test_mixed_labels_say_how_much_of_each_image_there_is(alphas: tuple[float, float], least: int, most: int) -> None:
    pixels, labels = batch()
    pixels = labels.to(torch.uint8).view(-1, 1, 1, 1).expand(6, 10, 10, 3) * 60  # the colour is the label
    prepare = data.Prepare(config("x", mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0]), 4, torch.device("cpu"), *alphas)
    cut = 0
    for _ in range(40):
        out, soft = prepare(pixels, labels, training=True)
        assert torch.allclose(soft.sum(1), torch.ones(6))
        assert torch.allclose(soft @ torch.arange(4.0) * 60 / 255, out.mean((1, 2, 3)), atol=1e-5)
        assert out.is_contiguous(memory_format=torch.channels_last)
        cut += bool(out.std((1, 2, 3)).max() > 1e-3)  # cutmix leaves an edge, mixup one colour
    assert least <= cut <= most
    plain, same = prepare(pixels, labels, training=False)
    assert same is labels
    assert torch.allclose(plain.mean((1, 2, 3)), labels * 60 / 255, atol=1e-5)


def test_torchvision_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys, data, torch; from fasttrain import shapes; from types import SimpleNamespace as N; "
        "data.Prepare(N(mean=[0.]*3, std=[1.]*3), 2, torch.device('cpu')); assert 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)


def test_folders_named_like_splits_are_no_classes(tmp_path: Path) -> None:
    for name in ("Val", "test"):
        (tmp_path / name).mkdir()
        assert cv2.imwrite(str(tmp_path / name / "1.png"), np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(UserError, match="folders named test, val would be taken for classes"):
        data.build(config(str(tmp_path)), 0)
