"""What `pack` packs: the images of a folder or of a data set of data.py, each turned into the bytes that are stored."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg

from fasttrain import images
from fasttrain.errors import UserError
from fasttrain.folder import Listing, printable
from fasttrain.images import ImageError, Picture, Pixels
from fasttrain.packed import SHAPE
from fasttrain.parts import Parts
from fasttrain.tools import project
from fasttrain.tools.pack_store import Made


@dataclass(frozen=True)
class Form:
    """How an image is stored: kind raw or jpeg; short side of at most `size`; square: only the middle; JPEG quality."""

    kind: str
    size: int
    square: bool
    quality: int

    def encode(self, picture: Picture) -> bytes:
        """The stored value. No image is enlarged, and a JPEG that is small enough is kept as it is.

        Raises:
            ImageError: the image is damaged.
        """
        small = min(picture.height, picture.width) <= self.size and not self.square
        if self.kind == "jpeg" and small and picture.jpeg is not None:
            picture.pixels()  # refuses damage
            return picture.jpeg
        pixels = np.ascontiguousarray(self.shrink(picture))
        if self.kind == "raw":
            return SHAPE.pack(*pixels.shape[:2]) + pixels.tobytes()
        encoded: bytes = simplejpeg.encode_jpeg(pixels, self.quality, "RGB", "420")
        return encoded

    def shrink(self, picture: Picture) -> Pixels:
        """uint8 RGB [height, width, 3]; averaged over areas, since what is done once may cost more."""
        height, width = picture.height, picture.width
        short = min(height, width)
        side = min(short, self.size)
        pixels = picture.pixels(next((r for r in (8, 4, 2) if short >= r * self.size), 1))
        if self.square:
            least = min(pixels.shape[:2])
            top, left = (pixels.shape[0] - least) // 2, (pixels.shape[1] - least) // 2
            pixels, target = pixels[top : top + least, left : left + least], (side, side)
        else:
            target = (max(1, round(height * side / short)), max(1, round(width * side / short)))
        if pixels.shape[:2] == target:
            return pixels
        resized = cv2.resize(np.ascontiguousarray(pixels), target[::-1], interpolation=cv2.INTER_AREA)
        return np.asarray(resized, dtype=np.uint8)


@dataclass
class Part:
    """One part of the source. data: with `original(index)`, or a plain data set of (uint8 image, label)."""

    name: str
    data: Any
    before: bytes  # in front of the names

    def __len__(self) -> int:
        return len(self.data)

    def stored_name(self, index: int) -> bytes:
        listing = getattr(self.data, "listing", None)
        return self.before + listing.name(index) if listing is not None else b"%s/%08d" % (self.name.encode(), index)

    def stamp(self, index: int) -> str:
        """Differs after the image's file was changed; empty for a data set of data.py, and for a file that is gone."""
        listing = getattr(self.data, "listing", None)
        try:
            return listing.stamp(index) if listing is not None else ""
        except OSError:
            return ""

    def read(self, index: int) -> tuple[Picture, int]:
        if hasattr(self.data, "original"):
            picture, label = self.data.original(index)
        else:
            from fasttrain import seeding  # imports torch, as data.py has

            seeding.seed_all(0, seeding.SAMPLE, 0, index)  # what is packed can be made again and compared
            picture, label = self.data[index][:2]
            picture = images.finished(picture)
        if not isinstance(picture, Picture):
            picture = _as_picture(picture, f"{self.name} {index}")
        return picture, int(label)


@dataclass
class Source:
    """All that is to be packed, as one row of images: those of the first part, then those of the next."""

    parts: list[Part]
    classes: list[str]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def at(self, place: int) -> tuple[Part, int]:
        for part in self.parts:
            if place < len(part):
                return part, place
            place -= len(part)
        raise IndexError(place)

    def prefetch(self, places: Sequence[int]) -> None:
        """Told what is read next: images behind URLs that lie side by side come in one request."""
        (first, index), (last, end) = self.at(places[0]), self.at(places[-1])
        if first is last and (prefetch := getattr(first.data, "prefetch", None)) is not None:
            prefetch(range(index, end + 1))

    def names(self) -> Iterator[bytes]:
        for part in self.parts:
            yield from map(part.stored_name, range(len(part)))

    def name(self, place: int) -> bytes:
        part, index = self.at(place)
        return part.stored_name(index)

    def fingerprint(self) -> str:
        """Differs where other images are found, or in another order."""
        digest = hashlib.blake2b(digest_size=16)
        for text in [*self.classes, *(f"{part.name}={len(part)}" for part in self.parts)]:
            digest.update(os.fsencode(text) + b"\0")
        for name in self.names():
            digest.update(name + b"\0")
        return digest.hexdigest()


@dataclass
class Packer:
    """Turns places into stored values; runs in the worker processes."""

    source: Source
    form: Form

    def __call__(self, places: Sequence[int]) -> list[Made]:
        self.source.prefetch(places)
        return [self.one(place) for place in places]

    def one(self, place: int) -> Made:
        part, index = self.source.at(place)
        stamp = part.stamp(index)  # before it is read: a change in between is then seen
        try:
            picture, label = part.read(index)
            value = self.form.encode(picture)
        except ImageError as error:
            return Made(None, -1, str(error), stamp=stamp)
        if not 0 <= label < len(self.source.classes):
            where = printable(self.source.name(place))
            raise UserError(f"{where}: has label {label}, but there are {len(self.source.classes)} classes")
        return Made(value, label, "", zlib.crc32(value), stamp)


class Files:
    """The images of a listing, not decoded."""

    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    def __len__(self) -> int:
        return len(self.listing)

    def prefetch(self, indices: Sequence[int]) -> None:
        self.listing.prefetch(indices)

    def original(self, index: int) -> tuple[Picture, int]:
        return self.listing.picture(index), self.listing.label(index)


def from_parts(root: str | Path, skip_list: str | None, cache: str | None = None) -> Source:
    """The parts of an image folder or of shards, labelled by the classes of training.

    Args:
        cache: data.root.

    Raises:
        UserError: no images; a class that training lacks.
    """
    parts = Parts(root, skip_list, cache)
    if parts.store:
        raise UserError(f"{printable(root)}: a packed store already; give the folder that it was made from")
    found: list[Part] = []
    classes: list[str] = []
    for name in parts.names:
        listing = parts.listing(name)
        classes = classes or listing.classes
        found.append(Part(name, Files(listing.with_classes(classes)), parts.before(name)))
    return Source(found, classes)


def from_data(cfg: Any, seed: int) -> tuple[Source, bool]:
    """What data.py builds, and whether that is the images before any transform.

    A data set may have `original(index)`, the image (uint8 array, or a Picture) and its label before any transform.
    Without it what validation sees is packed.
    """
    data = project.module("data")
    sets = data.build(cfg, seed)
    parts = {"train": sets.train, "val": sets.val}
    whole = all(hasattr(each, "original") for each in parts.values())
    if not whole:
        parts = {name: data.build_split(cfg, seed, name, sets.classes) for name in parts}
    return Source([Part(name, each, name.encode() + b"/") for name, each in parts.items()], list(sets.classes)), whole


def _as_picture(pixels: Any, name: str) -> Picture:
    array = np.asarray(pixels)
    gray_or_colour = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not gray_or_colour or not array.size:
        raise UserError(
            f"image {name} of data.py's data set: a {array.dtype} array of shape {list(array.shape)}; expected uint8 "
            "[height, width, 3], or [height, width] for gray"
        )
    return Picture.of(np.asarray(array, dtype=np.uint8))
