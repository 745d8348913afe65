"""What lies where in WebDataset shards: one pass over the headers of their tar files, kept for the next start.

A tar file has no table of contents, so nobody knows how many samples there are before its headers were read. Afterwards
a shard is like a folder: samples in any order, equal numbers for all ranks, a position to go on from. The webdataset
library says which members make a sample; here they stand for the place where their bytes lie.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from fasttrain.errors import UserError, one_line
from fasttrain.folder import EXTENSIONS
from fasttrain.names import printable
from fasttrain.remote import Remote, RemoteError, RemoteFile

FORMAT = 1
LABELS = ("cls", "json", "txt")  # where a sample's class stands: the first of them that it has
LONGEST = 1 << 20  # bytes of a header's extension or of a label's file
AT_ONCE = 16  # shards behind URLs
BLOCK = 1 << 18  # bytes of one request while headers are read
_PLACES = np.dtype([("shard", "<i4"), ("label", "<i4"), ("length", "<i4"), ("offset", "<i8"), ("size", "<i8")])


@dataclass(frozen=True)
class Shard:
    """A tar file: path or URL, name below data.path, what its server said (None for a local one), size and version."""

    path: str
    name: str
    remote: Remote | None
    stamp: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.remote.size if self.remote else int(self.stamp.split()[0])


@dataclass(frozen=True)
class Index:
    """The samples of some shards, in their order.

    Attributes:
        classes: names of the classes, as the shards write them.
        names: shard name, key and extension of each, one after another.
        places: structured array [n]: shard, label, length of the name, offset and size of the image in bytes.
    """

    classes: list[str]
    names: bytes
    places: NDArray[Any]


def index(shards: Sequence[Shard], cache: Path | None) -> Index:
    """Read the headers of all shards, or what was kept of them in the folder `cache`.

    Raises:
        UserError: a shard that can't be read, a sample without a class, no samples at all, no webdataset library.
    """
    identity = json.dumps([FORMAT, [[shard.path, shard.name, shard.stamp] for shard in shards]])
    kept = None if cache is None else cache / f"{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}.index"
    if kept is not None and (known := _load(kept, len(shards))) is not None:
        return known
    some_remote = any(shard.remote for shard in shards)
    if some_remote:
        logger.info("reading the headers of {} shards (once; kept in {})", len(shards), cache)
    with ThreadPoolExecutor(AT_ONCE if some_remote else 1) as threads:
        found = list(threads.map(_samples, shards))
    texts = Counter(text for each in found for _, text, _, _ in each)
    if not texts:
        raise UserError(f"{printable(shards[0].path)}: no images in {len(shards)} shards")
    classes = sorted(texts, key=_by_number if all(map(_is_number, texts)) else None)
    labels = {text: label for label, text in enumerate(classes)}
    rows = [
        (number, labels[text], len(name), offset, size)
        for number, each in enumerate(found)
        for name, text, offset, size in each
    ]
    names = b"".join(name for each in found for name, _, _, _ in each)
    result = Index(classes, names, np.array(rows, dtype=_PLACES))
    if kept is not None:
        _save(kept, result)
    return result


# ---- one shard -------------------------------------------------------------------------------------------------------

Sample = tuple[bytes, str, int, int]  # name, class, offset, size


def _samples(shard: Shard) -> list[Sample]:
    grouped = library()
    samples: list[Sample] = []
    others = 0
    try:
        with _open(shard) as file:
            for sample in grouped(_members(file, shard)):
                extension = next((e for e in EXTENSIONS if e in sample), None)
                if extension is None:
                    others += 1
                    continue
                name = f"{shard.name}/{sample['__key__']}.{extension}"
                offset, size, _ = sample[extension]
                samples.append((os.fsencode(name), _class_of(sample, name), offset, size))
    except RemoteError as error:
        raise UserError(f"{printable(shard.path)}: {error}") from error
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error.args[0] if error.args else error)
        raise UserError(
            f"{printable(shard.path)}: not a whole tar file ({printable(reason[:200])}; {len(samples)} samples before "
            "that): copy it again, or leave it out of data.path"
        ) from error
    if others:
        logger.warning("{}: {} samples without an image are left out", printable(shard.path), others)
    return samples


def _members(file: IO[bytes], shard: Shard) -> Iterator[dict[str, Any]]:
    """Each plain file of the tar, as the library expects it; in place of its content its offset, size and label."""
    before = -1
    with tarfile.open(fileobj=_Careful(file), mode="r:") as tar:  # type: ignore[call-overload]
        for member in tar:
            tar.members = []  # else it would keep all of them
            if member.offset <= before:  # older Pythons follow a negative size
                raise ValueError("its headers lead in a circle")
            before = member.offset
            meta = member.name.rpartition("/")[2].startswith("__")  # the library's rule for what is no sample
            if not member.isreg() or member.issparse() or meta:
                continue
            offset, size = member.offset_data, member.size
            if size < 0 or offset + size > shard.size:
                raise ValueError("cut off")
            label = None
            if member.name.lower().endswith(tuple(f".{each}" for each in LABELS)) and size <= LONGEST:
                file.seek(offset)
                label = file.read(size)
            yield {"fname": member.name, "data": (offset, size, label), "__url__": shard.path}
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile stops at garbage as at an end
            raise ValueError("no end mark where its headers end")


def _class_of(sample: dict[str, Any], name: str) -> str:
    """The class as a text: of .cls, else of "cls", "label" or "class" in .json, else of .txt."""
    for kind in LABELS:
        content = sample[kind][2] if kind in sample else None
        if content is None:
            continue
        try:
            text = content.decode()
            if kind == "json":
                found = json.loads(text)
                value = next((found[key] for key in ("cls", "label", "class") if key in found), None)
                text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        except (ValueError, TypeError, RecursionError):
            continue
        text = str(text).strip()
        if text and len(text) <= 200 and text.isprintable():
            return text
    raise UserError(
        f"{printable(name)}: no class: expected one line in {printable(sample['__key__'])}.cls or .txt beside the "
        'image, or "cls", "label" or "class" in .json'
    )


class _Careful:
    """Keeps tarfile from what a hostile header could make it do: read gigabytes at once, or go backwards for ever."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LONGEST:
            raise ValueError("a header that is too long")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()


def _open(shard: Shard) -> IO[bytes]:
    if shard.remote is None:
        return open(shard.path, "rb")
    return io.BufferedReader(RemoteFile(shard.path, shard.remote), BLOCK)


def library() -> Any:
    """The webdataset library's rule for what belongs to a sample: members in a row with the same name up to its dot."""
    try:
        from webdataset.tariterators import group_by_keys
    except ImportError as error:
        raise UserError(
            "data.path names tar files, they need the webdataset library: pip install webdataset"
        ) from error
    return group_by_keys


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 19


def _by_number(text: str) -> tuple[int, str]:
    return int(text), text


# ---- kept for the next start -----------------------------------------------------------------------------------------


def _save(file: Path, index: Index) -> None:
    """A line of JSON with a checksum, the places, the names. Without it the next start reads the headers again."""
    body = json.dumps({"classes": index.classes, "count": len(index.places)}).encode() + b"\n"
    body += index.places.tobytes() + index.names
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(hashlib.blake2b(body, digest_size=16).digest() + body)
        os.replace(part.name, file)
    except OSError as error:
        logger.info("the index of the shards can't be kept in {}: {}", file.parent, error.strerror)


def _load(file: Path, shards: int) -> Index | None:
    """What `_save` wrote; None for anything else, which is then made anew."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    body = content[16:]
    if hashlib.blake2b(body, digest_size=16).digest() != content[:16]:
        return None
    line, _, rest = body.partition(b"\n")
    try:
        about = json.loads(line)
        classes = [str(each) for each in about["classes"]]
        places = np.frombuffer(rest, _PLACES, about["count"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    names = rest[places.nbytes :]
    least = [places[field].min(initial=1) for field in ("shard", "label", "offset", "size")]
    most = (places["shard"].max(initial=0), places["label"].max(initial=0))
    sane = min(least) >= 0 and most[0] < shards and most[1] < len(classes) and len(places) > 0
    if not sane or places["length"].min() < 1 or int(places["length"].sum(dtype=np.int64)) != len(names):
        return None
    return Index(classes, names, places)
