"""Writes a packed store, in transactions that each hold images and how far they go: a kill loses the last one only."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import lmdb
import numpy as np

from fasttrain import packed
from fasttrain.errors import UserError, one_line
from fasttrain.folder import printable

LOCK = "packing.lock"
PROGRESS = b"\0progress"  # with 8 bytes, big-endian, behind it: which transaction
COMMIT_BYTES, COMMIT_SECONDS = 64 << 20, 5.0  # of images in one transaction; each ends with an fsync
_ROOM = 1 << 30  # bytes that the map grows by
LEAST = 1 << 18  # bytes free on the disk for LMDB's lock and first pages


class Made(NamedTuple):
    """What became of an image. value: None if it is broken, and why; sum: CRC-32; stamp: of the file it came from."""

    value: bytes | None
    label: int
    why: str = ""
    sum: int = 0
    stamp: str = ""


class Writer:
    """A store being written. Use as a context; `finish` makes it whole.

    Args:
        out: the store's folder.
        plan: JSON object that describes what is packed; a store begun with another is refused.
        total: images.

    Attributes:
        done: places packed before, all below this number.
        stamps: of the files that those came from, as 8 bytes each.
        broken: place -> reason.

    Raises:
        UserError: `out` is a finished store, something else, being written by another process, or begun otherwise.
    """

    def __init__(self, out: Path, plan: dict[str, Any], total: int) -> None:
        self.out, self.plan, self.total = out, plan, total
        self.labels = np.full(total, -1, dtype=np.int32)
        self.sums, self.stamps = np.zeros(total, dtype=np.uint32), np.zeros(total, dtype=np.uint64)
        self.broken: dict[int, str] = {}
        self.done = self._serial = 0
        self._batch: list[tuple[int, bytes, Made]] = []
        self._bytes, self._last = 0, time.monotonic()
        fresh = _is_fresh(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(out)
            if fresh and (out / packed.FILE).exists():
                (out / packed.FILE).unlink()  # killed before anything was in it
            if (
                shutil.disk_usage(out).free < LEAST
            ):  # LMDB writes to its files as memory: a full disk would end the process
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.env = lmdb.open(str(out), map_size=_ROOM, readahead=False, meminit=False)
        except (OSError, lmdb.Error) as error:
            raise UserError(f"{printable(out)}: can't be written: {error}") from error
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        self.env.close()
        self._lock.close()

    def add(self, first: int, names: Sequence[bytes], made: Sequence[Made]) -> None:
        """Images at the places from `first` on; written with the next transaction."""
        self._batch += zip(range(first, first + len(made)), names, made, strict=True)
        self._bytes += sum(len(each.value) for each in made if each.value)
        if self._bytes >= COMMIT_BYTES or time.monotonic() - self._last >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Write what has been added, to the disk."""
        if not self._batch:
            return
        record = {
            "done": [[place, made.label, made.sum, short(made.stamp)] for place, _, made in self._batch],
            "broken": {place: made.why for place, _, made in self._batch if made.value is None},
        }
        entries = [(packed.key(name), made.value) for _, name, made in self._batch if made.value is not None]
        self._record(record, entries)
        self._batch, self._bytes, self._last = [], 0, time.monotonic()

    def forget(self, places: Sequence[int], names: Sequence[bytes], why: str) -> None:
        """Take images out again; they count as broken until they are packed anew."""
        gone = [packed.key(name) for name in names]
        self._record({"done": [], "broken": {int(place): why for place in places}}, [], gone)

    def _record(self, record: dict[str, Any], entries: list[tuple[bytes, bytes]], gone: Sequence[bytes] = ()) -> None:
        progress = (PROGRESS + self._serial.to_bytes(8, "big"), json.dumps(record).encode())
        self._write([*entries, progress], gone)
        self._serial += 1
        self._take(record)

    def finish(self, names: Iterable[bytes], classes: list[str], counts: dict[str, int]) -> dict[str, int]:
        """Write the index, mark the store as whole, remove what only packing needs.

        Returns:
            Images of each part, without the broken ones.
        """
        self.commit()
        kept = self.labels >= 0
        ends = np.cumsum(list(counts.values()))
        left = {
            part: int(kept[end - count : end].sum()) for (part, count), end in zip(counts.items(), ends, strict=True)
        }
        index = packed.pack_index([n for n, good in zip(names, kept, strict=True) if good], self.labels[kept])
        about = {
            **self.plan,
            "format": packed.FORMAT,
            "complete": True,
            "classes": classes,
            "parts": left,
            "checksum": hashlib.blake2b(index, digest_size=16).hexdigest(),
        }
        gone = [PROGRESS + number.to_bytes(8, "big") for number in range(self._serial)]
        sums = self.sums[kept].astype("<u4").tobytes()
        entries = [(packed.INDEX, index), (packed.SUMS, sums), (packed.ABOUT, json.dumps(about).encode())]
        self._write(entries, gone)
        self.close()
        for name in ("lock.mdb", LOCK):
            with suppress(FileNotFoundError):
                (self.out / name).unlink()
        return left

    def _resume(self) -> None:
        with self.env.begin() as transaction:
            value = transaction.get(packed.ABOUT)
            if value is not None:
                _check_plan(self.out, packed.read_about(value, str(self.out)), self.plan)
            cursor = transaction.cursor()
            found = cursor.set_range(PROGRESS)
            while found and cursor.key().startswith(PROGRESS):
                self._take(json.loads(cursor.value()))
                self._serial += 1
                found = cursor.next()
        if value is None:
            self._write(
                [(packed.ABOUT, json.dumps({**self.plan, "format": packed.FORMAT, "complete": False}).encode())]
            )

    def _take(self, record: dict[str, Any]) -> None:
        for place, label, total, stamp in record["done"]:
            self.labels[place], self.sums[place], self.stamps[place] = label, total, stamp
            self.broken.pop(place, None)
            self.done = max(self.done, place + 1)
        for place, why in record["broken"].items():
            self.labels[int(place)] = -1
            self.broken[int(place)] = why

    def _write(self, entries: Sequence[tuple[bytes, bytes]], gone: Sequence[bytes] = ()) -> None:
        """One transaction; again with a larger map where that one was too small."""
        while True:
            try:
                with self.env.begin(write=True) as transaction:
                    for name, value in entries:
                        if not transaction.put(name, value, overwrite=name.startswith(b"\0")):
                            raise UserError(f"{printable(name)}: two images of the source have this name")
                    for name in gone:
                        transaction.delete(name)
                self._fill_up()
                return
            except lmdb.MapFullError:
                self.env.set_mapsize(self.env.info()["map_size"] + max(_ROOM, 2 * sum(len(v) for _, v in entries)))
            except lmdb.Error as error:
                reason = one_line(error)
                raise UserError(
                    f"{printable(self.out)}: can't be written after {self.done} of {self.total} images ({reason}); make"
                    " room and run the same command again: it goes on there"
                ) from error

    def _fill_up(self) -> None:
        """LMDB counts pages at the end that it gave back unwritten; a file without them would look cut off."""
        file, needed = self.out / packed.FILE, (self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"]
        if file.stat().st_size < needed:
            os.truncate(file, needed)


def short(stamp: str) -> int:
    """A stamp as a number of 8 bytes; 0 for none."""
    return int.from_bytes(hashlib.blake2b(stamp.encode(), digest_size=8).digest(), "big") if stamp else 0


def _is_fresh(out: Path) -> bool:
    """Whether nothing of a store is there yet. Raises UserError for what must not be touched."""
    try:
        there = set(os.listdir(out))
    except FileNotFoundError:
        return True
    except OSError as error:
        raise UserError(f"{printable(out)}: can't be used: {error.strerror}") from error
    if there - {packed.FILE, "lock.mdb", LOCK}:
        some = printable(sorted(there - {packed.FILE, "lock.mdb", LOCK})[0])
        raise UserError(f"{printable(out)}: not empty ({some} is there): name a new folder")
    if packed.FILE not in there or (LOCK in there and os.path.getsize(out / packed.FILE) == 0):
        return True
    packed.check_file(str(out))
    if LOCK not in there:
        raise _finished(out)
    return False


def _check_plan(out: Path, begun: dict[str, Any], plan: dict[str, Any]) -> None:
    if begun.get("complete"):
        raise _finished(out)
    flat, wanted = _flat(begun), _flat(plan)
    for name, value in wanted.items():
        if flat.get(name) != value:
            what = (
                "other files were found in it then"
                if name == "fingerprint"
                else f"it was begun with {name}={printable(str(flat.get(name)))}, now {name}={printable(str(value))}"
            )
            raise UserError(
                f"{printable(out)}: half packed, but {what}; give the same source and settings again, or remove it"
            )


def _finished(out: Path) -> UserError:
    return UserError(
        f"{printable(out)}: holds a store already, which is not overwritten: remove it or name a new folder"
    )


def _flat(plan: dict[str, Any]) -> dict[str, Any]:
    return {"source": plan.get("source"), **(plan.get("form") or {}), "fingerprint": plan.get("fingerprint")}


def _lock(out: Path) -> IO[bytes]:
    """Keep a second process out of this folder; the system undoes it when this one ends, however it ends."""
    file = open(out / LOCK, "ab")  # noqa: SIM115 (open as long as the store)
    try:
        import fcntl
    except ImportError:  # Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise UserError(f"{printable(out)}: another process is packing into it") from error
    return file
