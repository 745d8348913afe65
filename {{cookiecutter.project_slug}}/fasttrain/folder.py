"""An image folder on disk: which files there are, what class each belongs to, and how a part is split off.

    root/<class>/**/<image>        one folder a class, named by it; images may lie deeper

The result is a `Listing`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from fasttrain.errors import UserError
from fasttrain.listing import Listing as Listing
from fasttrain.names import printable as printable
from fasttrain.names import some

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")  # in any case
# Passed over, like every name that begins with a dot.
SYSTEM = {b"__MACOSX", b"Thumbs.db", b"desktop.ini", b"lost+found", b"@eaDir", b"$RECYCLE.BIN"}
_ENDINGS = tuple(b"." + e.encode() for e in EXTENSIONS)


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
        raise UserError(f"{shown}: no images in its {len(folders)} folders ({some(empty)}); files looked for: {known}")
    if loose:
        logger.warning("{}: {} images beside the class folders are left out", shown, loose)
    if empty:
        logger.warning("{}: no images in {}: left out of the classes", shown, some(empty))
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
