"""A packed store: a data set in one LMDB file, as `python -m fasttrain pack` writes it. This is how it is read.

    OUT/data.mdb     name of each image, as it was below the source folder -> the image
                     raw:  height, width (uint32, little-endian), then uint8 RGB pixels [height, width, 3]
                     jpeg: a JPEG file
                     and entries under names that no file can have: ABOUT (JSON), INDEX and SUMS

INDEX is int32 lengths [n] and labels [n], then the names one after another; ABOUT holds its checksum. SUMS is uint32
[n], the CRC-32 of each image, for `check-data`: comparing it at each reading would cost more than the reading.

Nothing in a store is executed, and the file is checked before LMDB maps it (fasttrain/lmdb_file.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from fasttrain import host, lmdb_file
from fasttrain.errors import UserError
from fasttrain.folder import Listing, printable
from fasttrain.images import ImageError, Picture
from fasttrain.lmdb_file import FILE as FILE
from fasttrain.lmdb_file import LmdbFileError

FORMAT = 2
ABOUT, INDEX, SUMS = b"\0about", b"\0index", b"\0sums"
SHAPE = struct.Struct("<II")  # before raw pixels
_LONGEST_KEY = 511  # bytes; LMDB's limit


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether this folder is a packed store, finished or not."""
    return os.path.isfile(os.path.join(path, FILE))


def key(name: bytes) -> bytes:
    """What an image is stored under: its name, with a checksum for the end of one that LMDB would find too long."""
    if len(name) <= _LONGEST_KEY:
        return name
    return name[: _LONGEST_KEY - 33] + b"\0" + hashlib.blake2b(name, digest_size=16).hexdigest().encode()


def pack_index(names: Sequence[bytes], labels: Sequence[int] | NDArray[np.int32]) -> bytes:
    """The value of INDEX."""
    lengths = np.fromiter(map(len, names), dtype="<i4", count=len(names))
    return lengths.tobytes() + np.asarray(labels, dtype="<i4").tobytes() + b"".join(names)


@dataclass(frozen=True)
class Stored(Listing):
    """Images of a packed store; `root` in front of a name is no file, it names the image.

    Attributes:
        kind: raw or jpeg.
        sums: CRC-32 of the stored bytes, uint32 [n].
    """

    kind: str = ""
    sums: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> Stored:
        return replace(super().subset(indices), sums=self.sums[np.asarray(indices, dtype=np.int64)])

    def picture(self, index: int) -> Picture:
        return read_picture(self.root, self.kind, self.name(index))

    def content(self, index: int) -> bytes:
        return bytes(read_value(self.root, self.name(index)) or b"")

    def damaged(self, index: int) -> bool:
        """Whether the stored bytes are others than those that were packed."""
        return zlib.crc32(self.content(index)) != int(self.sums[index])


@dataclass(frozen=True)
class Store:
    """A finished store. Holds no open file, so it can go to any process, forked or not.

    Attributes:
        root: its folder.
        kind: raw or jpeg.
        listings: the images of each part, in their order.
    """

    root: str
    kind: str
    listings: dict[str, Stored]

    def picture(self, name: bytes) -> Picture:
        """One image. Raw pixels are not copied: they stay in the page cache, which all processes share.

        Raises:
            ImageError: it isn't there, or what lies there is no such image.
        """
        return read_picture(self.root, self.kind, name)


def read_picture(root: str, kind: str, name: bytes) -> Picture:
    """`Store.picture` for who keeps only the folder and the kind."""
    value = read_value(root, name)
    if value is not None and kind == "raw" and len(value) > SHAPE.size:
        height, width = SHAPE.unpack_from(value)
        if height and width and len(value) == SHAPE.size + 3 * height * width:
            return Picture.of(np.frombuffer(value, np.uint8, offset=SHAPE.size).reshape(height, width, 3))
    shown = os.path.join(root, os.fsdecode(name))
    if value is None:
        raise ImageError(shown, "isn't in the packed store: pack it anew")
    if kind == "jpeg":
        return Picture(bytes(value), shown)
    raise ImageError(shown, f"is damaged in the packed store ({len(value)} bytes that are no raw image): pack it anew")


def read_value(root: str, name: bytes) -> memoryview | None:
    """The stored bytes of one image, where LMDB keeps them; None if it has none of this name."""
    return _open(root).get(key(name))


def entries(root: str) -> int:
    """How many entries there are, ABOUT and INDEX among them."""
    return int(_open(root).env.stat()["entries"])


def load(root: str | os.PathLike[str]) -> Store:
    """Read what a store holds; its images are read later, one by one.

    Raises:
        UserError: not a finished store of this version, or a damaged one.
    """
    where = os.fspath(root)
    check_file(where)
    about = read_about(_open(where).get(ABOUT), where)
    if not about.get("complete"):
        raise UserError(f"{printable(where)}: not packed to its end; run the same `python -m fasttrain pack` once more")
    try:
        kind = _kind(about["form"]["kind"])
        return Store(where, kind, _listings(where, kind, about, _open(where).get(INDEX), _open(where).get(SUMS)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, StopIteration) as error:
        raise _damaged(where, f"its index is not what was written: {error}") from error


def read_about(value: Any, where: str) -> dict[str, Any]:
    """The description of a store, finished or not. Raises: UserError: not ours, or of another version."""
    try:
        about = json.loads(bytes(value)) if value is not None else None
    except (ValueError, RecursionError) as error:
        raise _damaged(where, "its description can't be read") from error
    if not isinstance(about, dict) or "format" not in about:
        raise UserError(f"{printable(where)}: an LMDB file, but not made by `python -m fasttrain pack`")
    if about["format"] != FORMAT:
        found = f"format {printable(str(about['format'])[:20])}, this project reads format {FORMAT}"
        raise UserError(f"{printable(where)}: packed in {found}: pack it anew")
    return about


def _kind(kind: Any) -> str:
    if kind not in ("raw", "jpeg"):
        raise ValueError(f"images of kind {kind!r:.20}")
    return str(kind)


def _listings(
    where: str, kind: str, about: dict[str, Any], index: memoryview | None, sums: memoryview | None
) -> dict[str, Stored]:
    """The parts of the store, from INDEX. Raises ValueError or TypeError for what doesn't fit together."""
    classes, counts = about["classes"], about["parts"]
    if index is None or hashlib.blake2b(index, digest_size=16).hexdigest() != about["checksum"]:
        raise ValueError("its checksum differs")
    total = sum(counts.values())
    sane = all(isinstance(name, str) for name in classes) and next(iter(counts)) in ("train", "all")
    if not sane or min(counts.values()) < 0 or len(index) < 8 * total:
        raise ValueError("counts or classes make no sense")
    lengths = np.frombuffer(index, "<i4", total).astype(np.int32)
    labels = np.frombuffer(index, "<i4", total, offset=4 * total).astype(np.int32)
    names = bytes(index[8 * total :])
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    if total and (lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != len(names)):
        raise ValueError("lengths of names make no sense")
    if total and not (0 <= int(labels.min()) <= int(labels.max()) < len(classes)):
        raise ValueError("labels outside of the classes")
    if sums is None or len(sums) != 4 * total:
        raise ValueError("its list of checksums is not of its length")
    checksums = np.frombuffer(sums, "<u4").astype(np.uint32)
    everything = Stored(where, list(classes), names, starts, lengths, labels, kind, checksums)
    ends = np.cumsum(list(counts.values()))
    return {
        part: everything.subset(np.arange(end - count, end))
        for (part, count), end in zip(counts.items(), ends.tolist(), strict=True)
    }


# ---- the LMDB file ---------------------------------------------------------------------------------------------------


def check_file(root: str) -> None:
    """Refuse a file that LMDB could not read safely: see fasttrain/lmdb_file.py.

    Raises:
        UserError: in one line what is wrong with it.
    """
    try:
        lmdb_file.check_tree(root)
    except (OSError, LmdbFileError) as error:
        raise _unreadable(root, error) from error


def _unreadable(root: str, error: Exception) -> UserError:
    reason = f"can't be read: {error.strerror}" if isinstance(error, OSError) else str(error)
    return UserError(f"{printable(os.path.join(root, FILE))}: {reason}")


class _Opened:
    """One LMDB environment of this process, with a read transaction for each thread, which cost nothing to keep."""

    def __init__(self, root: str) -> None:
        lmdb_file.check(root)
        self.root, self.pid = root, os.getpid()
        # The kernel reads ahead unless told not to. Where all of it will fit, what it reads ahead is used later; where
        # not, it would read up to 128 KB for one small image.
        used, total = host.memory()
        ahead = os.path.getsize(os.path.join(root, FILE)) < total - used
        self.env = lmdb.open(root, readonly=True, lock=False, create=False, meminit=False, readahead=ahead)
        self._transactions: dict[int, Any] = {}

    def get(self, name: bytes) -> memoryview | None:
        thread = threading.get_ident()
        transaction = self._transactions.get(thread)
        if transaction is None:
            transaction = self._transactions[thread] = self.env.begin(buffers=True)
        try:
            found: memoryview | None = transaction.get(name)
        except lmdb.Error as error:
            raise _damaged(self.root, f"LMDB says {error}") from error
        return found


_opened: dict[str, _Opened] = {}
_opening = threading.Lock()


def _open(root: str) -> _Opened:
    """The environment of this process: an LMDB environment must not be used on the other side of a fork."""
    opened = _opened.get(root)
    if opened is not None and opened.pid == os.getpid():
        return opened
    with _opening:
        opened = _opened.pop(root, None)
        if opened is not None and opened.pid != os.getpid():
            opened.env.close()  # only this process's copy of it; lmdb opens a file once in a process
            opened = None
        try:
            opened = _opened[root] = opened or _Opened(root)
        except (OSError, LmdbFileError) as error:
            raise _unreadable(root, error) from error
        except lmdb.Error as error:
            raise _damaged(root, f"LMDB can't open it: {error}") from error
    return opened


def close(root: str | os.PathLike[str]) -> None:
    """Forget a store that was read in this process. No picture of it may be in use."""
    opened = _opened.pop(os.fspath(root), None)
    if opened is not None:
        opened.env.close()


def _damaged(root: str | Path, reason: str) -> UserError:
    return UserError(f"{printable(root)}: this packed store is damaged: {reason}")
