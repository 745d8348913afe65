"""Is one image whole, and is anything odd about it? Decodes all of it; a look at the header finds little."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from PIL import Image

from fasttrain import packed
from fasttrain.errors import one_line
from fasttrain.folder import Listing, printable
from fasttrain.images import ImageError, Picture

TINY, HUGE = 8, 50_000_000  # pixels of the short side; pixels in all
_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "tif": "TIFF", "tiff": "TIFF"}  # others are named like their extension
_PLAIN = ("RGB", "L")  # modes that need no word
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass
class Finding:
    """What was found in one image. digest: of its bytes; broken: why, else None; odd: texts."""

    digest: bytes
    broken: str | None = None
    odd: list[str] = field(default_factory=list)


@dataclass
class Checker:
    """Checks images by their place in the row of all listings; runs in the worker processes."""

    listings: list[Listing]

    def __call__(self, places: Sequence[int]) -> list[Finding]:
        (first, index), (last, end) = self.at(places[0]), self.at(places[-1])
        if first is last:
            first.prefetch(range(index, end + 1))
        return [self.one(place) for place in places]

    def at(self, place: int) -> tuple[Listing, int]:
        for listing in self.listings:
            if place < len(listing):
                return listing, place
            place -= len(listing)
        raise IndexError(place)

    def one(self, place: int) -> Finding:
        listing, index = self.at(place)
        if isinstance(listing, packed.Stored):
            return _stored(listing, index)
        path = listing.path(index)
        try:
            return check(listing.content(index), path)
        except ImageError as error:
            return Finding(b"", _without(path, error))


def check(data: bytes, path: str) -> Finding:
    """Decode an image file as training does, and once more by Pillow."""
    finding = Finding(hashlib.blake2b(data, digest_size=16).digest())
    try:
        picture = Picture(data, path)
        picture.pixels()
    except ImageError as error:
        finding.broken = _without(path, error)
        return finding
    finding.odd = [*_sizes(picture), *_by_pillow(data, path)]
    return finding


def _sizes(picture: Picture) -> list[str]:
    shape = f"{picture.width}x{picture.height} pixels"
    if min(picture.height, picture.width) < TINY:
        return [f"tiny: {shape}"]
    return [f"huge: {shape}"] if picture.height * picture.width > HUGE else []


def _by_pillow(data: bytes, path: str) -> list[str]:
    odd = []
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
            warnings.simplefilter("ignore")
            kind = "JPEG" if image.format == "MPO" else image.format or ""  # a JPEG with more pictures behind it
            mode, pictures = image.mode, int(getattr(image, "n_frames", 1))
            orientation = int(image.getexif().get(_ORIENTATION, 1) or 1)
            if kind == "JPEG":
                image.load()  # the others went through Pillow before
    except Exception as error:  # Pillow's readers raise almost anything
        return [f"Pillow can't decode it: {one_line(error) or type(error).__name__}"]
    extension = os.path.splitext(path)[1][1:].lower()
    if _FORMATS.get(extension, extension.upper()) != kind:
        odd.append(f"wrong extension: is {kind}")
    if mode not in _PLAIN:
        odd.append(f"mode {mode}")
    if 2 <= orientation <= 8:
        odd.append(f"turned by EXIF: orientation {orientation}")
    if pictures > 1 and image.format != "MPO":
        odd.append(f"animated: {pictures} pictures, the first is used")
    return odd


def _stored(listing: packed.Stored, index: int) -> Finding:
    finding = Finding(hashlib.blake2b(listing.content(index), digest_size=16).digest())
    if listing.damaged(index):
        finding.broken = "is damaged in the packed store (its checksum differs): pack it anew"
        return finding
    try:
        picture = listing.picture(index)
        picture.pixels()
        finding.odd = _sizes(picture)
    except ImageError as error:
        finding.broken = str(error).split(": ", 1)[-1]
    return finding


def _without(path: str, error: ImageError) -> str:
    return str(error).removeprefix(f"{printable(path)}: ")
