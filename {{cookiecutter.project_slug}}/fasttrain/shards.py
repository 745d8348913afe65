"""WebDataset shards as a data set: where they are, which part each belongs to, and how an image is read from them.

    folder/train/*.tar  folder/val/*.tar        or *.tar in one folder, with train, val or test in their names
    "folder/train-{000..099}.tar"               a pattern of paths or http(s) URLs, with braces or * ? [...]

A shard's part is the first of the words train, val (valid, validation) and test in its file's name, else its folder
of that name. Where none is named train, all shards make one part.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fasttrain import remote, shard_index
from fasttrain.errors import UserError
from fasttrain.images import ImageError
from fasttrain.listing import Listing
from fasttrain.names import printable, some
from fasttrain.remote import RemoteError
from fasttrain.shard_index import Shard

MOST = 100_000  # shards of a pattern
LARGEST = 1 << 30  # bytes of an image
GAP, TOGETHER = 1 << 16, 8 << 20  # bytes: images this close to each other, and no more in all, are one request
AT_ONCE = 16  # requests of a process under way
_PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_SPECIAL = re.compile(r"[*?\[{]")


def is_shards(path: str) -> bool:
    """Whether data.path means tar files: a URL, a pattern, a file, or a folder with tar files and no class folders."""
    if remote.is_url(path) or (path.endswith(".tar") and not os.path.isdir(path)) or is_pattern(path):
        return True
    return any(_tars(folder) for folder in (path, os.path.join(path, "train")))


def is_pattern(path: str) -> bool:
    """Whether it is to be expanded: there is no such file, and it has tar files in it and a special character."""
    return bool(_SPECIAL.search(path)) and ".tar" in path and not os.path.exists(path)


@dataclass(frozen=True)
class Sharded(Listing):
    """Images in shards. For each image 20 bytes more than in a folder: its shard, offset and size."""

    shards: tuple[Shard, ...] = ()
    shard: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def subset(self, indices: Sequence[int] | NDArray[np.int64]) -> Sharded:
        at = np.asarray(indices, dtype=np.int64)
        chosen = super().subset(at)
        return replace(chosen, shard=self.shard[at], offsets=self.offsets[at], sizes=self.sizes[at])

    def content(self, index: int) -> bytes:
        shard, offset, size = self.place(index)
        if size > LARGEST:
            raise ImageError(self.path(index), f"is too large for an image ({size} bytes)")
        if shard.remote is None:
            return self._local(index, shard, offset, size)
        found = _fetched.pop((shard.path, offset), None)
        try:
            return remote.fetch(shard.path, offset, size, shard.remote) if found is None else found
        except RemoteError as error:
            raise ImageError(self.path(index), f"can't be read ({error})") from error

    def place(self, index: int) -> tuple[Shard, int, int]:
        """Shard, offset and size of one image."""
        return self.shards[self.shard[index]], int(self.offsets[index]), int(self.sizes[index])

    def _local(self, index: int, shard: Shard, offset: int, size: int) -> bytes:
        # Opened for each image: about 10 us, against a limit of open files and a state that must not be forked.
        try:
            with open(shard.path, "rb", buffering=0) as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise ImageError(self.path(index), f"can't be read ({error.strerror})") from error
        if len(content) < size:
            raise ImageError(self.path(index), f"its shard is cut off ({len(content)} of {size} bytes)")
        return content

    def prefetch(self, indices: Sequence[int]) -> None:
        """Fetch these images from their servers, many at once, since each request takes its time on the way."""
        wanted = [self.place(index) for index in indices]
        ranges = _ranges([place for place in wanted if place[0].remote is not None and place[2] <= LARGEST])
        _fetched.clear()
        if ranges:
            list(_threads().map(_fetch, ranges))

    def stamp(self, index: int) -> str:
        return self.place(index)[0].stamp


class Parts:
    """The shards that data.path means, by part; they are indexed when a part is asked for.

    Args:
        path: see above.
        cache: a folder for what is kept of them: indices, and shards of servers that don't send parts of a file.

    Raises:
        UserError: no shards, one that can't be had, or some that are in no part while others are.
    """

    def __init__(self, path: str, cache: Path | None) -> None:
        found = _expand(path)
        self.cache = cache
        self.root = _common(found)
        parts = {each: _part(each) for each in found}
        if "train" in parts.values():
            if lost := [each for each, part in parts.items() if part is None]:
                raise UserError(f"{printable(path)}: neither train, val nor test is in the name of {some(lost)}")
        else:
            parts = dict.fromkeys(found, "all")
        names = [name for name in ("train", "val", "test", "all") if name in parts.values()]
        self.paths = {name: [each for each in found if parts[each] == name] for name in names}
        self._listings: dict[str, Sharded] = {}

    def listing(self, part: str) -> Sharded:
        """The images of one part, labelled by the classes that its shards name."""
        if part in self._listings:
            return self._listings[part]
        shards = self._shards(self.paths[part])
        index = shard_index.index(shards, self.cache)
        places = index.places
        lengths = places["length"].astype(np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        labels, shard = places["label"].astype(np.int32), places["shard"].astype(np.int32)
        offsets, sizes = places["offset"].astype(np.int64), places["size"].astype(np.int64)
        found = self._listings[part] = Sharded(
            self.root, index.classes, index.names, starts, lengths, labels, tuple(shards), shard, offsets, sizes
        )
        return found

    def _shards(self, paths: list[str]) -> list[Shard]:
        with ThreadPoolExecutor(AT_ONCE if remote.is_url(paths[0]) else 1) as threads:
            return list(threads.map(self._shard, paths))

    def _shard(self, path: str) -> Shard:
        name = path.removeprefix(self.root).lstrip("/")
        try:
            if not remote.is_url(path):
                return _local_shard(path, name)
            found = remote.look(path)
            stamp = f"{found.size} {found.version}"
            if found.ranges:
                return Shard(path, name, found, stamp)
            if self.cache is None:
                raise RemoteError("the server sends whole files only, and there is no place to keep them")
            kept = self.cache / (hashlib.blake2b(f"{path} {stamp}".encode(), digest_size=12).hexdigest() + ".tar")
            if not kept.exists():
                remote.download(path, kept, found.size)
            return _local_shard(str(kept), name)
        except RemoteError as error:
            raise UserError(f"{printable(path)}: {error}") from error


def _local_shard(path: str, name: str) -> Shard:
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(f"{printable(path)}: can't be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):  # a pipe would block its reader
        raise UserError(f"{printable(path)}: is no file")
    return Shard(path, name, None, f"{found.st_size} {found.st_mtime_ns}")


# ---- which shards there are ------------------------------------------------------------------------------------------


def _expand(path: str) -> list[str]:
    if os.path.isdir(path):
        found = _tars(path)
        for part in _PARTS:
            found += _tars(os.path.join(path, part))
    elif remote.is_url(path) or is_pattern(path):
        found = []
        for each in _braces(path):
            special = not remote.is_url(each) and _SPECIAL.search(each) and not os.path.exists(each)
            found += sorted(glob.glob(each, recursive=True)) if special else [each]
    else:
        found = [path]
    found = [each.replace(os.sep, "/") for each in found]
    if not found:
        raise UserError(f"{printable(path)}: no tar files are there")
    if len(set(found)) < len(found):
        raise UserError(f"{printable(path)}: names {some([max(found, key=found.count)])} more than once")
    return found


def _braces(pattern: str) -> list[str]:
    total, rest = 1, pattern
    while group := re.search(r"\{([^{}]*)\}", rest):
        span = re.match(r"(-?\d{1,18})\.\.(-?\d{1,18})", group[1])
        total *= abs(int(span[2]) - int(span[1])) + 1 if span else group[1].count(",") + 1
        rest = rest[: group.start()] + rest[group.end() :]
        if total > MOST:
            raise UserError(f"data.path={printable(pattern[:200])}: more than {MOST} shards")
    shard_index.library()  # says what to install, if it isn't there
    from braceexpand import braceexpand

    try:
        return list(islice(braceexpand(pattern, escape=False), MOST))
    except ValueError as error:
        raise UserError(f"data.path={printable(pattern[:200])}: braces that don't fit together") from error


def _tars(folder: str) -> list[str]:
    """Tar files in a folder; none if it has folders of classes, so that it is an image folder."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    if any(entry.is_dir() and entry.name.lower() not in _PARTS for entry in found):
        return []
    return sorted(entry.path for entry in found if entry.name.lower().endswith(".tar") and entry.is_file())


def _part(path: str) -> str | None:
    folder, _, file = path.split("?")[0].rpartition("/")
    words = re.split(r"[^a-z]+", file.lower())
    return next((_PARTS[word] for word in words if word in _PARTS), _PARTS.get(folder.rpartition("/")[2].lower()))


def _common(paths: list[str]) -> str:
    """The folder that all of them lie in, with a slash behind it."""
    folders = zip(*(path.split("/")[:-1] for path in paths), strict=False)
    return "".join(f"{names[0]}/" for names in takewhile(lambda names: len(set(names)) == 1, folders))


# ---- from servers ----------------------------------------------------------------------------------------------------

Range = tuple[Shard, int, int, list[tuple[int, int]]]  # shard, offset and size in all, those of each image

_fetched: dict[tuple[str, int], bytes] = {}  # what `prefetch` brought for this process
_pool: tuple[int, ThreadPoolExecutor] | None = None
_making = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    """The threads of this process: they don't come along in a fork."""
    global _pool
    with _making:
        if _pool is None or _pool[0] != os.getpid():
            _pool = os.getpid(), ThreadPoolExecutor(AT_ONCE, "fetch")
        return _pool[1]


def _ranges(places: Sequence[tuple[Shard, int, int]]) -> list[Range]:
    """What to ask for: images that lie close together in one request."""
    ranges: list[Range] = []
    for shard, offset, size in sorted(places, key=lambda place: (place[0].path, place[1])):
        last = ranges[-1] if ranges else None
        if last and last[0] is shard and offset <= last[1] + last[2] + GAP and offset + size - last[1] <= TOGETHER:
            ranges[-1] = (shard, last[1], max(last[2], offset + size - last[1]), [*last[3], (offset, size)])
        else:
            ranges.append((shard, offset, size, [(offset, size)]))
    return ranges


def _fetch(wanted: Range) -> None:
    """What can't be had is left out: reading the image asks once more, and says why."""
    shard, start, count, images = wanted
    assert shard.remote is not None
    try:
        content: Any = memoryview(remote.fetch(shard.path, start, count, shard.remote))
    except RemoteError:
        return
    for offset, size in images:
        _fetched[shard.path, offset] = bytes(content[offset - start : offset - start + size])
