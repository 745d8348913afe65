"""How names of files are shown."""

from __future__ import annotations

import os


def printable(path: str | bytes | os.PathLike[str]) -> str:
    """`path` as one line that every console can take: bytes that aren't UTF-8 as ``\\xff``, line ends as ``\\n``."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def some(names: list[str], most: int = 5) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(n) for n in names[:most]) + more
