"""Files behind http(s) URLs, read by parts: each request asks for a range of bytes.

Nothing is kept on disk, so a data set may be larger than it. A request that fails on the way is made again a few
times; an answer that does not fit to what was known of the file is an error.
"""

from __future__ import annotations

import http.client
import io
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.error import HTTPError, URLError

from fasttrain.errors import UserError, one_line
from fasttrain.names import printable

PATIENCE = 30.0  # seconds without an answer
WAITS = (0.2, 1.0, 3.0)  # seconds before another try
_LATER = (408, 425, 429, 500, 502, 503, 504)  # answers that may be other ones soon
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")  # first byte and length of the file

T = TypeVar("T")


class RemoteError(Exception):
    """What went wrong, in a few words, without the URL."""


class Remote(NamedTuple):
    """What a server says of a file. version: its ETag or date; ranges: whether parts of it can be asked for."""

    size: int
    version: str
    ranges: bool


def is_url(path: str) -> bool:
    """Whether it is a URL that this module reads."""
    return path.lower().startswith(("http://", "https://"))


def look(url: str) -> Remote:
    """Ask a server for a file's size and version.

    Raises:
        RemoteError: no such file, or no answer.
    """

    def ask() -> Remote:
        with _open(url, "bytes=0-511") as answer:
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status == 206 and found:
                return Remote(int(found[2]), _version(answer), True)
            length = answer.headers.get("Content-Length", "")
            if answer.status != 200 or not length.isdecimal():
                raise RemoteError("the server doesn't say how long it is")
            return Remote(int(length), _version(answer), False)

    return _tried(ask)


def fetch(url: str, start: int, count: int, remote: Remote) -> bytes:
    """Bytes of a file.

    Args:
        remote: what `look` said; a file that has changed since is refused.

    Raises:
        RemoteError: not to be had.
    """

    def ask() -> bytes:
        with _open(url, f"bytes={start}-{start + count - 1}") as answer:
            found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not found or int(found[1]) != start:
                raise RemoteError("the server didn't send the part that was asked for")
            if (int(found[2]), _version(answer)) != (remote.size, remote.version):
                raise RemoteError("was changed on the server meanwhile")
            content: bytes = answer.read(count)
        if len(content) < count:
            raise ConnectionError(f"{len(content)} of {count} bytes came")
        return content

    return _tried(ask)


def download(url: str, target: Path, size: int) -> None:
    """The whole file, for servers that don't send parts. It is there whole or not at all.

    Raises:
        RemoteError: it can't be fetched.
        UserError: no room for it, or the folder can't be written.
    """

    def ask() -> None:
        part = Path(tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}-")[1])
        try:
            with _open(url) as answer, part.open("wb") as file:
                shutil.copyfileobj(answer, file, 1 << 20)
            if (found := part.stat().st_size) != size:
                raise ConnectionError(f"{found} of {size} bytes came")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    where = printable(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if size > free:
            raise UserError(
                f"{printable(url)}: its server sends whole files only, and {where} (data.root) has no room for it: "
                f"{size / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free"
            )
        _tried(ask)
    except OSError as error:  # of the disk: those of the network have become a RemoteError
        raise UserError(f"{where}: can't be written ({error.strerror}); set data.root to another folder") from error


class RemoteFile(io.RawIOBase):
    """A file object over `fetch`; wrap it in io.BufferedReader, whose buffer is what one request brings."""

    def __init__(self, url: str, remote: Remote) -> None:
        self.url, self.remote, self.at = url, remote, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.remote.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.remote.size - self.at)
        if count <= 0:
            return 0
        buffer[:count] = fetch(self.url, self.at, count, self.remote)
        self.at += count
        return count


def _tried(ask: Callable[[], T]) -> T:
    """``ask()``, again after a while where the network or the server failed. Raises: RemoteError; OSError of a disk."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except ValueError as error:  # not a URL
            raise RemoteError(_reason(error)) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and not isinstance(error, (URLError, ConnectionError, TimeoutError)):
                raise
            refused = isinstance(error, HTTPError) and error.code not in _LATER
            if wait is None or refused:
                raise RemoteError(_reason(error)) from error
            time.sleep(wait)
    raise AssertionError  # not reached: the last wait is None


def _open(url: str, part: str | None = None) -> Any:
    """The answer to a request. Without the handlers for file:, ftp: and data:, which a redirection could lead to."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener.open(urllib.request.Request(url, headers={"Range": part} if part else {}), timeout=PATIENCE)


def _version(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")


def _reason(error: BaseException) -> str:
    if isinstance(error, HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(text)
