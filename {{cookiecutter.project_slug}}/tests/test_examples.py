"""The examples of the README: data in HDF5 and TFRecord is packed and trained on, other libraries transform images."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HOME
from PIL import Image

from config import Config
from fasttrain import packed, settings
from fasttrain.feed import Feed
from fasttrain.tools import pack

README = (HOME / "README.md").read_text()


def example(name: str) -> str:
    """The Python of the README that stands below this comment."""
    found = re.search(rf"```python\n# {re.escape(name)}\n(.*?)```", README, re.DOTALL)
    assert found is not None, name
    return found[1]


def pixels(number: int) -> Any:
    return np.full((30, 40, 3), number, np.uint8)


def hdf5(file: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(file, "w") as out:
        for part, count in (("train", 12), ("val", 4)):
            out[f"{part}/images"] = np.stack([pixels(number) for number in range(count)])
            out[f"{part}/labels"] = np.arange(count) % 2


def tfrecord(file: Path) -> None:
    writer = pytest.importorskip("tfrecord.writer")
    file.mkdir()
    for part, count in (("train", 12), ("val", 4)):
        out = writer.TFRecordWriter(str(file / f"{part}.tfrecord"))
        for number in range(count):
            content = io.BytesIO()
            Image.fromarray(pixels(number)).save(content, "PNG")
            out.write({"image": (content.getvalue(), "byte"), "label": (number % 2, "int")})
        out.close()


@pytest.fixture
def with_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """data.py with an example put behind it, as the project's tools find it."""

    def load(name: str) -> Any:
        module = types.ModuleType("data")
        monkeypatch.setitem(sys.modules, "data", module)
        source = (HOME / "data.py").read_text() + "\n" + example(name)
        exec(compile(source, "data.py", "exec"), module.__dict__)
        return module

    return load


def config(path: Path) -> Any:
    arguments = [f"data.path={path}", "data.image_size=40", "data.batch_size=4"]
    return settings.load(Config, HOME / "config.yaml", arguments)[0].data


def batches(data: Any, path: Path, workers: int, epochs: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    cfg = config(path)
    sets = data.build(cfg, 0)
    cpu = torch.device("cpu")
    feed = Feed(sets.train, sets.val, cfg, workers=workers, epochs=epochs, seed=0, rank=0, world=1, device=cpu)
    try:
        return [
            (batch.tensors[0].clone(), batch.tensors[1].clone())
            for epoch in range(epochs)
            for batch in feed.train(epoch)
        ]
    finally:
        feed.close()


@pytest.mark.parametrize(("name", "write"), [("HDF5", hdf5), ("TFRecord", tfrecord)])
def test_data_of_other_forms_is_trained_on_and_packed(
    name: str, write: Callable[[Path], None], with_example: Callable[[str], Any], tmp_path: Path
) -> None:
    write(tmp_path / "source")
    found = batches(with_example(name), tmp_path / "source", workers=1)
    assert [images.shape for images, _ in found] == [(4, 40, 40, 3)] * 3
    assert sum(int(labels.sum()) for _, labels in found) == 6
    assert pack.main([str(tmp_path / "source"), str(tmp_path / "store"), "--dataset", "--jobs=1"]) == 0
    listings = packed.load(tmp_path / "store").listings
    assert {part: len(listing) for part, listing in listings.items()} == {"train": 12, "val": 4}
    assert [int(listings["train"].picture(i).pixels().mean()) for i in range(12)] == list(range(12))
    assert listings["train"].labels.tolist() == [0, 1] * 6


@pytest.mark.parametrize("name", ["torchvision", "albumentations"])
def test_transforms_of_other_libraries_draw_the_same_with_any_number_of_workers(
    name: str, with_example: Callable[[str], Any], images: Path
) -> None:
    pytest.importorskip(name, reason=f"pip install {name}")
    data = with_example(name)
    alone, two = (batches(data, images, workers, epochs=2) for workers in (0, 2))
    assert len(alone) == len(two) == 32
    assert all(torch.equal(one, other) for one, other in zip(sum(alone, ()), sum(two, ()), strict=True))
    seen = [image.numpy().tobytes() for images, _ in alone for image in images]
    assert len(set(seen)) > 120  # of 64 images in two epochs
