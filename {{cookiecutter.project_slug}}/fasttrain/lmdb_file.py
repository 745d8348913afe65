"""Checks an LMDB file before LMDB maps it. LMDB trusts its file: a page number that points behind the end, or a value
longer than what is left, ends the process with a signal instead of an error.

The format is LMDB 0.9's on 64 bits, little-endian: pages of `size` bytes, the first two of which are headers that
take turns; a tree of branch pages (key -> page) over leaf pages (key -> value, or the page where a long value begins).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILE = "data.mdb"
_HEADER = struct.Struct("<QHHHHIIQQ" + 2 * "IHHQQQQQ" + "QQ")  # page, magic, and two trees: free pages, entries
_PAGE = struct.Struct("<QHHHH")  # its number, unused, what it is, end of the node table, begin of the nodes
_MAGIC, _VERSION, _NO_PAGE, _DEEPEST = 0xBEEFC0DE, 1, 0xFFFFFFFFFFFFFFFF, 32
_BRANCH, _LEAF, _IS_HEADER = 1, 2, 8
_LONG = 1  # flag of a node: its value has pages of its own


class LmdbFileError(Exception):
    """What is wrong with the file, in a few words."""


@dataclass
class Header:
    """The header in use. size: of a page, bytes; last: number of the last page; root: of the entries' tree."""

    size: int
    last: int
    depth: int
    flags: int
    root: int
    transaction: int


def check(root: str) -> Header:
    """Check the headers and the length of the file: enough against one that was cut off. Costs microseconds.

    Raises:
        LmdbFileError: not an LMDB file, or shorter than it should be.
        OSError: it can't be read.
    """
    path = os.path.join(root, FILE)
    length = os.path.getsize(path)
    with open(path, "rb") as file:
        first = file.read(_HEADER.size)
        size = _HEADER.unpack(first)[9] if len(first) == _HEADER.size else 0
        file.seek(size if 256 <= size <= 65536 else 0)
        headers = [_read_header(first, size, 0), _read_header(file.read(_HEADER.size), size, 1)]
    if None in headers:
        raise LmdbFileError(f"not an LMDB file, or its beginning is damaged ({length} bytes)")
    whole = [header for header in headers if header is not None]
    needed = (max(header.last for header in whole) + 1) * size
    if length < needed:
        raise LmdbFileError(f"cut off: {length} of {needed} bytes; copy it again")
    return max(whole, key=lambda header: header.transaction)


def check_tree(root: str) -> None:
    """Check all that LMDB follows to reach a value: branch and leaf pages. About a second for a million images.

    Raises:
        LmdbFileError, OSError: as `check`; or a page that can't be followed.
    """
    header = check(root)
    if header.root == _NO_PAGE:
        return
    if header.flags or not 1 <= header.depth <= _DEEPEST:
        raise LmdbFileError("damaged: its tree is none of ours")
    with open(os.path.join(root, FILE), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        tree = _Tree(mapped, header)
        try:
            tree.walk()
        finally:
            tree.forget()


def _read_header(page: bytes, size: int, number: int) -> Header | None:
    """One of LMDB's two headers; None for what can't be one."""
    if len(page) < _HEADER.size:
        return None
    own, _, kind, _, _, magic, version, _, _, page_size, *rest = _HEADER.unpack(page)
    roots, last = (rest[6], rest[14]), rest[15]
    known = (own, kind & _IS_HEADER, magic, version) == (number, _IS_HEADER, _MAGIC, _VERSION)
    sizes = page_size == size and size in (1 << n for n in range(8, 17))
    if not known or not sizes or not all(root == _NO_PAGE or 2 <= root <= last for root in roots):
        return None
    return Header(size, last, depth=rest[9], flags=rest[8], root=roots[1], transaction=rest[16])


class _Tree:
    def __init__(self, mapped: mmap.mmap, header: Header) -> None:
        self.header, self.length = header, len(mapped)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)

    def forget(self) -> None:
        """Let go of the map, which can't be closed before."""
        del self.bytes

    def walk(self) -> None:
        pages, seen = [self.header.root], 0
        for level in range(self.header.depth, 0, -1):
            seen += len(pages)
            if seen > self.header.last:  # a page that is met twice
                raise LmdbFileError("damaged: its tree leads in a circle")
            below: list[int] = []
            for page in pages:
                at, low, flags, keys = self.nodes(page, _LEAF if level == 1 else _BRANCH)
                if level > 1:
                    children = low | flags << 32
                    self.require(len(at) > 1 and ((children >= 2) & (children <= self.header.last)).all(), page)
                    below += children.tolist()
                else:
                    self.values(page, at, low, flags, keys)
            pages = below

    def nodes(self, page: int, kind: int) -> tuple[Any, Any, Any, Any]:
        """Of each node of a page: where it begins, length of its value (or its child), flags, where its key ends."""
        size, begin = self.header.size, page * self.header.size
        own, _, found, lower, upper = _PAGE.unpack(self.bytes[begin : begin + _PAGE.size].tobytes())
        self.require(own == page and found == kind and 18 <= lower <= upper <= size and lower % 2 == 0, page)
        words = self.bytes[begin : begin + size].view("<u2").astype(np.int64)
        at = words[8 : lower // 2]
        self.require(((at >= upper) & (at <= size - 8) & (at % 2 == 0)).all(), page)
        low, high, flags, length = (words[at // 2 + field] for field in range(4))
        keys = at + 8 + length
        self.require((keys <= size).all(), page)
        return at, low | high << 16, flags, keys

    def values(self, page: int, at: Any, sizes: Any, flags: Any, keys: Any) -> None:
        """All values lie inside of the file."""
        size, begin, long = self.header.size, page * self.header.size, flags == _LONG
        ends = keys + np.where(long, 8, sizes)
        self.require(((flags == 0) | long).all() and (ends <= size).all(), page)
        places = begin + keys[long]
        first = sum(self.bytes[places + byte].astype(np.uint64) << np.uint64(8 * byte) for byte in range(8))
        if long.any():
            self.require(((first >= 2) & (first <= self.header.last)).all(), page)
            self.require((first.astype(np.int64) * size + 16 + sizes[long] <= self.length).all(), page)

    def require(self, good: Any, page: int) -> None:
        if not good:
            raise LmdbFileError(f"damaged: its page {page} can't be followed; copy it again or pack it anew")
