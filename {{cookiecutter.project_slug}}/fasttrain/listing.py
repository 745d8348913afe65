"""Which images a part of a data set has, what class each belongs to, and how one is read.

A `Listing` holds all names in one block of bytes instead of a million strings, so that a worker process shares its
parent's memory: reading a Python string writes to its reference count, which makes a forked process copy the page it
lies on, and the memory of a large data set then grows by the number of workers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from fasttrain import images
from fasttrain.errors import UserError
from fasttrain.names import printable, some

Self = TypeVar("Self", bound="Listing")


@dataclass(frozen=True)
class Listing:
    """The images of a part, in a fixed order: files below a folder, or what a subclass reads. About 16 bytes and the
    length of its name for each.

    Attributes:
        root: the folder that the paths start at.
        classes: names of the classes; a label is a place in this list.
        names: all paths below root, one after another.
        starts, lengths: int64 and int32 [n], where in `names` the path of each image lies.
        labels: int32 [n].
    """

    root: str
    classes: list[str]
    names: bytes
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> bytes:
        """The path of one image below `root`."""
        start = int(self.starts[index])
        return self.names[start : start + int(self.lengths[index])]

    def path(self, index: int) -> str:
        """The file of one image."""
        return os.path.join(self.root, os.fsdecode(self.name(index)))

    def label(self, index: int) -> int:
        """The class of one image, as a place in `classes`."""
        return int(self.labels[index])

    def content(self, index: int) -> bytes:
        """The bytes of one image file. Raises: ImageError: it can't be read."""
        return images.read(self.path(index))

    def picture(self, index: int) -> images.Picture:
        """One image, not decoded yet. Raises: ImageError: it can't be read, or is none."""
        return images.Picture(self.content(index), self.path(index))

    def prefetch(self, indices: Sequence[int]) -> None:
        """Told what is read next, for who can fetch several images at once."""

    def stamp(self, index: int) -> str:
        """Differs after the file was changed. Raises: OSError."""
        found = os.stat(self.path(index))
        return f"{found.st_size} {found.st_mtime_ns}"

    def fingerprint(self) -> str:
        """The same for the same files in the same order with the same labels, wherever the folder lies."""
        digest = hashlib.blake2b(self.names, digest_size=16)
        for numbers in (self.starts, self.lengths, self.labels):
            digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def subset(self: Self, indices: Sequence[int] | NDArray[np.int64]) -> Self:
        """The images at `indices`, in that order; the block of paths is shared, not copied."""
        at = np.asarray(indices, dtype=np.int64)
        return replace(self, starts=self.starts[at], lengths=self.lengths[at], labels=self.labels[at])

    def with_classes(self: Self, classes: Sequence[str]) -> Self:
        """The same images, labelled by the class list of a training set or checkpoint.

        A class of `classes` without images here is a warning.

        Raises:
            UserError: this folder has a class that isn't in `classes`; its images would have no right label.
        """
        known = {name: label for label, name in enumerate(classes)}
        extra = [name for name in self.classes if name not in known]
        if extra:
            raise UserError(
                f"{printable(self.root)}: {some(extra)} not among the {len(known)} classes of the training images "
                f"({some(list(classes))}): rename or remove the folder, or add it to the training images"
            )
        if missing := [name for name in classes if name not in self.classes]:
            where, count = printable(self.root), f"{len(missing)} of the {len(known)} classes"
            logger.warning("{}: no images of {} ({})", where, count, some(missing))
        new = np.array([known[name] for name in self.classes], dtype=np.int32)
        return replace(self, classes=list(classes), labels=new[self.labels])
