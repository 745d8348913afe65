"""The parts that a data set is divided into, in an image folder as in shards or a packed store, less a skip list.

root/train  root/val (or valid, validation)  root/test       parts train, val, test: those that are there
root/<class>                                                 one part, all

fasttrain/shards.py says the same of tar files.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from loguru import logger

from fasttrain import folder, packed, shards
from fasttrain.errors import UserError
from fasttrain.folder import Listing, printable

VALIDATION = ("val", "valid", "validation")


class Parts:
    """What lies at `root`; the parts of an image folder or of shards are scanned when they are asked for.

    Args:
        root: data.path.
        skip_list: a file that names images to leave out.
        cache: data.root, a folder for what is kept of shards; None keeps nothing.

    Attributes:
        names: of the parts.
        store: the packed store, if it is one.
        shards: the shards, if it is that.
        folders: those of the parts, if it is an image folder.

    Raises:
        UserError: a skip list, a store or shards that can't be read.
    """

    def __init__(
        self, root: str | os.PathLike[str], skip_list: str | None = None, cache: str | os.PathLike[str] | None = None
    ) -> None:
        self.root, self.store, self.shards = os.fspath(root), None, None
        self.folders: dict[str, Path] = {}
        if packed.is_store(root):
            self.store = packed.load(root)
        elif shards.is_shards(self.root):
            self.shards = shards.Parts(self.root, None if cache is None else Path(cache) / "shards")
        else:
            self.folders = _folders(Path(root))
        self.names = tuple(self.store.listings if self.store else self.shards.paths if self.shards else self.folders)
        self._skip = None if skip_list is None else read_skip_list(skip_list)
        if skip_list is not None:
            self._warn_of_unknown(skip_list)

    def listing(self, part: str) -> Listing:
        """The images of one part, labelled by its own folders, or by the store's class map.

        Raises:
            UserError: the folder holds no classes or images; or the skip list names all of them.
        """
        found = self._listing(part)
        if not self._skip:
            return found
        before = self.before(part)
        kept = [i for i in range(len(found)) if before + found.name(i) not in self._skip]
        if not kept:
            raise UserError(f"{printable(found.root)}: the skip list names all {len(found)} images of it ({part})")
        if len(kept) < len(found):
            where, count = printable(found.root), len(found) - len(kept)
            logger.info("{}: {} images left out by the skip list ({})", where, count, part)
        return found.subset(np.array(kept))

    def _listing(self, part: str) -> Listing:
        if self.store:
            return self.store.listings[part]
        return self.shards.listing(part) if self.shards else folder.scan(self.folders[part])

    def before(self, part: str) -> bytes:
        """What stands in front of a name of this part's listing to make it a path below `root`."""
        return _below(self.folders[part], Path(self.root)) if self.folders else b""

    @property
    def skipped(self) -> frozenset[bytes]:
        """The entries of the skip list."""
        return frozenset(self._skip or ())

    def _warn_of_unknown(self, skip_list: str) -> None:
        """One line for entries that name nothing: a list of another data set, or files that are gone."""
        assert self._skip is not None
        if not self.folders:
            listings = map(self._listing, self.names)
            unknown = self._skip - {listing.name(i) for listing in listings for i in range(len(listing))}
        else:
            top = os.fsencode(self.root)
            unknown = {name for name in self._skip if not os.path.lexists(os.path.join(top, name))}
        if unknown:
            some = ", ".join(printable(name) for name in sorted(unknown)[:5])
            more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
            where = printable(self.root)
            logger.warning("{}: {} entries are not in {}: {}{}", printable(skip_list), len(unknown), where, some, more)


def read_skip_list(file: str) -> set[bytes]:
    r"""Paths below data.path, one a line, as check-data writes them: ``\n`` and ``\\`` stand for odd characters."""
    try:
        lines = Path(file).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"data.skip_list={printable(file)}: can't be read: {error.strerror}") from error
    entries = (line.removesuffix(b"\r") for line in lines)
    parts = (entry.split(rb"\\") for entry in entries if entry)
    return {b"\\".join(p.replace(rb"\n", b"\n").replace(rb"\r", b"\r") for p in part) for part in parts}


def skip_list_line(name: bytes) -> bytes:
    """One entry of a skip list, the other way round."""
    return name.replace(b"\\", rb"\\").replace(b"\n", rb"\n").replace(b"\r", rb"\r") + b"\n"


def _folders(root: Path) -> dict[str, Path]:
    if not (root / "train").is_dir():
        return {"all": root}
    found = {"train": root / "train"}
    if (val := next((root / name for name in VALIDATION if (root / name).is_dir()), None)) is not None:
        found["val"] = val
    if (root / "test").is_dir():
        found["test"] = root / "test"
    return found


def _below(inner: Path, outer: Path) -> bytes:
    return b"" if inner == outer else os.fsencode(inner.relative_to(outer)) + b"/"
