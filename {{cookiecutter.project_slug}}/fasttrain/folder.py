"""An image folder on disk: which files there are, what class each belongs to, and how a part is split off.

    root/<class>/**/<image>        one folder a class, named by it; images may lie deeper

The result is a `Listing`. It holds all paths in one block of bytes instead of a million strings, so that a worker
process shares its parent's memory: reading a Python string writes to its reference count, which makes a forked
process copy the page it lies on, and the memory of a large data set then grows by the number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from fasttrain.errors import UserError

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")  # in any case
# Passed over, like every name that begins with a dot.
SYSTEM = {b"__MACOSX", b"Thumbs.db", b"desktop.ini", b"lost+found", b"@eaDir", b"$RECYCLE.BIN"}
_ENDINGS = tuple(b"." + e.encode() for e in EXTENSIONS)


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """`path` as one line that every console can take: bytes that aren't UTF-8 as ``\\xff``, line ends as ``\\n``."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True)
class Listing:
    """The images of a folder, in a fixed order. About 16 bytes and the length of its path for each file.

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

    def fingerprint(self) -> str:
        """The same for the same files in the same order with the same labels, wherever the folder lies."""
        digest = hashlib.blake2b(self.names, digest_size=16)
        for numbers in (self.starts, self.lengths, self.labels):
            digest.update(np.ascontiguousarray(numbers).data)
        return digest.hexdigest()

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> Listing:
        """The images at `indices`, in that order; the block of paths is shared, not copied."""
        at = np.asarray(indices, dtype=np.int64)
        return replace(self, starts=self.starts[at], lengths=self.lengths[at], labels=self.labels[at])

    def with_classes(self, classes: Sequence[str]) -> Listing:
        """The same images, labelled by the class list of a training set or checkpoint.

        A class of `classes` without images here is a warning.

        Raises:
            UserError: this folder has a class that isn't in `classes`; its images would have no right label.
        """
        known = {name: label for label, name in enumerate(classes)}
        extra = [name for name in self.classes if name not in known]
        if extra:
            raise UserError(
                f"{printable(self.root)}: {_some(extra)} not among the {len(known)} classes of the training images "
                f"({_some(classes)}): rename or remove the folder, or add it to the training images"
            )
        if missing := [name for name in classes if name not in self.classes]:
            where, count = printable(self.root), f"{len(missing)} of the {len(known)} classes"
            logger.warning("{}: no images of {} ({})", where, count, _some(missing))
        new = np.array([known[name] for name in self.classes], dtype=np.int32)
        return replace(self, classes=list(classes), labels=new[self.labels])


def scan(root: str | os.PathLike[str]) -> Listing:
    """Find the images below `root`, which has one folder a class; classes and files in the order of their bytes.

    Hidden and system files are passed over; links are followed, except into a folder that one is already in.
    What else is passed over (an empty class, images beside the class folders, broken links) is a warning.

    Raises:
        UserError: the folder can't be read or holds no classes or no images.
    """
    top = os.fsencode(root)
    shown = printable(top)
    folders, loose, others = [], 0, 0
    for entry in _entries(top):
        if entry.is_dir():
            folders.append(entry.name)
        elif is_image(entry.name):
            loose += 1
        else:
            others += 1
    if not folders:
        found = f"{loose} images lie directly in it" if loose else f"{others} other files" if others else "it is empty"
        raise UserError(f"{shown}: no class folders ({found}); put the images of each class into a folder named by it")

    classes: list[str] = []
    empty: list[str] = []
    names, lengths, labels, broken = bytearray(), array("i"), array("i"), 0
    for folder in folders:
        before = len(labels)
        for name in _walk(top, folder, (_identity(top),)):
            if name.endswith(b"\0"):  # no file name can hold it
                broken += 1
                continue
            names += name
            lengths.append(len(name))
            labels.append(len(classes))
        (classes if len(labels) > before else empty).append(os.fsdecode(folder))
    if not classes:
        known = ", ".join(EXTENSIONS)
        raise UserError(f"{shown}: no images in its {len(folders)} folders ({_some(empty)}); files looked for: {known}")
    if loose:
        logger.warning("{}: {} images beside the class folders are left out", shown, loose)
    if empty:
        logger.warning("{}: no images in {}: left out of the classes", shown, _some(empty))
    if broken:
        logger.warning("{}: {} links that lead nowhere are left out", shown, broken)
    sizes = np.frombuffer(lengths, dtype=np.int32) if lengths.itemsize == 4 else np.array(lengths, dtype=np.int32)
    starts = np.cumsum(sizes, dtype=np.int64) - sizes
    return Listing(os.fsdecode(top), classes, bytes(names), starts, sizes, np.array(labels, dtype=np.int32))


def split(listing: Listing, fraction: float, seed: int) -> tuple[Listing, Listing]:
    """Split off about `fraction` of each class for validation; the same images for the same seed.

    Returns:
        (training, validation): no image in both, at least one in each. A class of a single image stays in training.

    Raises:
        UserError: fewer than two images.
    """
    if len(listing) < 2:
        where, total = printable(listing.root), len(listing)
        raise UserError(f"{where}: {total} image can't be split into training and validation: at least 2 are needed")
    training, validation = split_labels(listing.labels, fraction, seed)
    return listing.subset(training), listing.subset(validation)


def split_labels(labels: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same for samples of which only the labels are known, at least two: the places of either part, ascending."""
    total = len(labels)
    rng = np.random.default_rng(seed)
    order = rng.permutation(total)
    by_class = order[np.argsort(labels[order], kind="stable")]  # shuffled within each class
    counts = np.bincount(labels)

    # Whole parts first, then one more for the largest remainders: the total is right even where the classes are small.
    share = fraction * counts
    take = np.floor(share).astype(np.int64)
    left = min(max(round(fraction * total), 1), total - 1) - int(take.sum())
    by_remainder = np.lexsort((rng.random(len(counts)), take - share))
    room = np.maximum(counts - 1, 0) if (counts > 1).any() else counts
    for label in (c for c in by_remainder if room[c] > take[c]):
        if left <= 0:
            break
        take[label] += 1
        left -= 1

    place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)  # of each image within its class
    in_val = place < np.repeat(take, counts)
    return np.sort(by_class[~in_val]), np.sort(by_class[in_val])


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A folder to fill that becomes `target` at the end, in one step: nobody ever sees half of it.

    Of two processes that do this at once one wins, and the other's work is thrown away. If the block raises, nothing
    is left; after a kill a folder named ``.<name>-*`` stays beside the target, and no harm is done by it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        part.chmod(0o755)  # mkdtemp's folder is for its owner alone
        yield part
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _walk(top: bytes, folder: bytes, above: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    """Paths below `top` of the images in one of its folders; links that lead nowhere have a zero byte behind them."""
    where = os.path.join(top, folder)
    here = _identity(where)
    if here in above:  # a link back up
        return
    for entry in _entries(where):
        name = os.path.join(folder, entry.name)
        if entry.is_dir():
            yield from _walk(top, name, (*above, here))
        elif is_image(entry.name):
            if entry.is_file():  # not a pipe or a socket, which would block its reader
                yield name
            elif entry.is_symlink():
                yield name + b"\0"


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    try:
        with os.scandir(folder) as entries:
            kept = [e for e in entries if not is_hidden(e.name)]
    except OSError as error:
        raise UserError(f"{printable(folder)}: can't be read: {error.strerror}") from error
    return sorted(kept, key=lambda e: e.name)


def _identity(folder: bytes) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def is_hidden(name: bytes) -> bool:
    """Whether a file or folder of this name is passed over in silence."""
    return name.startswith(b".") or name in SYSTEM


def is_image(name: bytes) -> bool:
    """Whether it has the extension of an image."""
    return name.lower().endswith(_ENDINGS)


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(printable(n) for n in listed[:most]) + more
