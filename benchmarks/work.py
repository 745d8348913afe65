"""What all competitors are asked to do, and the few things that they share."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATIO = (3 / 4, 4 / 3)  # width / height of a random crop, torchvision's default


@dataclass(frozen=True)
class Work:
    """One job: batches of random resized crops, mirrored by chance, uint8.

    Attributes:
        photos: the image folder, `photos/<class>/*.jpg`.
        data: what the competitor's `prepare` made of it; the photos for those who take them as they are.
        project: folder of the fasttrain project.
        kind: folder, raw or jpeg: photos as they are, or packed at 256 x 256.
        workers: processes or threads, whichever the competitor has.
        batch: images of a batch; size: pixels of a side.
        scale: area of a crop as a part of the image; flip: chance of a mirrored one.
    """

    photos: Path
    data: Path
    project: Path
    kind: str = "folder"
    workers: int = 2
    batch: int = 64
    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Work:
        """From what `json` made of `dataclasses.asdict`."""
        paths = {name: Path(fields[name]) for name in ("photos", "data", "project")}
        least, most = fields["scale"]
        return cls(**{**fields, **paths, "scale": (least, most)})

    def with_data(self, data: Path) -> Work:
        return dataclasses.replace(self, data=data)


def endless(epoch: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Epoch after epoch, for those whose loaders end."""
    while True:
        yield from epoch()


def files(photos: Path) -> list[tuple[str, int]]:
    """Every photo and its label, in the order of their names."""
    classes = sorted(folder for folder in photos.iterdir() if folder.is_dir())
    return [(str(file), label) for label, folder in enumerate(classes) for file in sorted(folder.glob("*.jpg"))]


def module(work: Work, name: str) -> Any:
    """A module of the fasttrain project."""
    home = str(work.project)
    if home not in sys.path:
        sys.path.insert(0, home)
    return importlib.import_module(name)


def decode(work: Work) -> Callable[[str], Any]:
    """The project's own way from a file to a finished crop, for competitors that bring no decoder.

    OpenCV's own threads are off, as in the project's workers.
    """
    import cv2

    cv2.setNumThreads(0)
    images = module(work, "fasttrain.images")

    def one(path: str) -> Any:
        return images.random_resized_crop(images.load(path), work.size, work.scale, flip=work.flip).pixels()

    return one


def alone(initialise: int) -> None:
    """`worker_init_fn` of the stock DataLoader: one thread for OpenCV, as in the project's workers."""
    import cv2

    cv2.setNumThreads(0)
