"""The process that writes checkpoints, and how their file is laid out. Needs the standard library only.

    python -I -S fasttrain/saver.py PARENT FD SIZE        started by writer.py, never by hand

It is started by its path, without torch and without the project, so that it is there within milliseconds and takes a
few MB. A request comes in on its standard input, the answer, a line of JSON, goes out on its standard output; the
tensors lie in the memory that FD is. It ends when its parent does, however that ends.

The file is the ZIP archive that `torch.save` writes, nothing packed, each entry with its CRC-32: plain `torch.load`
reads it, and `python -m zipfile -t last.pt` finds a damaged one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import select
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 8 << 20  # bytes between two looks at the parent, and at the disk
SYNC = 64 << 20  # bytes after which they are sent to the disk: a disk busy for seconds would hold up the data's readers
SPARE = 1 / 20  # of the file's size, to stay free beside it
ALIGNED = 64  # the beginning of each tensor in the file, as torch has it
EVERY = 0.5  # seconds between two looks at the parent while there is nothing to do
NICE = 10  # a busy core gives the saver a tenth of itself


def write(
    path: Path,
    skeleton: bytes,
    sizes: Sequence[int],
    contents: Iterable[Any],
    previous: Path | None = None,
    alive: Callable[[], object] = lambda: None,
) -> int:
    """Write the file whole or not at all: to a temporary name, to the disk, then renamed. Returns its bytes.

    Args:
        skeleton: the pickle of all but the tensors' contents (snapshot.py).
        sizes, contents: of the tensors; a content is a buffer of bytes.
        previous: the name under which the file that stands at `path` is kept.
        alive: called again and again; may raise to give up.

    Raises:
        OSError: the disk is full or can't be written; what stood there before is unharmed.
    """
    need = _need(skeleton, sizes)
    free = shutil.disk_usage(path.parent).free
    if free < need:
        raise OSError(f"{need / 1e6:,.1f} MB are to be written, {free / 1e6:,.1f} MB are free on the disk")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            _archive(file, skeleton, contents, alive)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        alive()
        if previous is not None and path.exists():
            _keep(path, previous)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the renaming itself reaches the disk with the folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return size


def _need(skeleton: bytes, sizes: Sequence[int]) -> float:
    return (len(skeleton) + sum(sizes) + 200 * len(sizes)) * (1 + SPARE)


def _make_room(path: Path, previous: Path, need: float) -> None:
    """Where the disk is too full by it, the file before the last is given up: it is there only for a damaged one."""
    if path.exists() and previous.exists():
        free = shutil.disk_usage(path.parent).free
        if free < need <= free + previous.stat().st_size:
            previous.unlink()


def _keep(path: Path, previous: Path) -> None:
    """Give the file its second name, so that there is no moment without a whole file at `path`."""
    link = path.with_name(f".{previous.name}.{os.getpid()}.tmp")
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links: for a moment there is only the previous one
        path.replace(previous)
        return
    link.replace(previous)


def _entries(skeleton: bytes, contents: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    yield "data.pkl", skeleton
    yield "byteorder", sys.byteorder.encode()
    for number, content in enumerate(contents):
        yield f"data/{number}", content
    yield "version", b"3\n"


def _archive(file: BinaryIO, skeleton: bytes, contents: Iterable[Any], alive: Callable[[], object]) -> None:
    synced = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in _entries(skeleton, contents):
            info = zipfile.ZipInfo(f"archive/{name}")  # the fixed date of ZipInfo: equal contents, equal files
            info.file_size = len(content)
            large = 20 if info.file_size * 1.05 > zipfile.ZIP64_LIMIT else 0  # bytes that zipfile adds then
            padding = -(file.tell() + 30 + len(info.filename) + large + 4) % ALIGNED
            info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with archive.open(info, "w") as entry:
                for begin in range(0, len(content), CHUNK):
                    entry.write(memoryview(content)[begin : begin + CHUNK])
                    alive()
                    if file.tell() - synced >= SYNC:
                        synced = file.tell()
                        file.flush()
                        os.fsync(file.fileno())


def answer(
    folder: str,
    files: Sequence[tuple[str, str | None]],
    skeleton: bytes,
    sizes: Sequence[int],
    contents: Callable[[], Iterable[Any]],
    alive: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Write the files, each a name and that under which the file there before is kept. For each bytes and seconds, or
    the error."""
    done: dict[str, dict[str, Any]] = {}
    for name, previous in files:
        if previous is not None:
            with contextlib.suppress(OSError):  # writing meets it again, and says it
                _make_room(Path(folder, name), Path(folder, previous), _need(skeleton, sizes))
    for name, previous in files:
        began = time.perf_counter()
        path = Path(folder, name)
        try:
            kept = None if previous is None else path.with_name(previous)
            size = write(path, skeleton, sizes, contents(), kept, alive)
            done[name] = {"bytes": size, "seconds": time.perf_counter() - began}
        except OSError as error:
            done[name] = {"error": error.strerror or str(error)}
    return done


def pieces(memory: Any, records: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """The tensors in a snapshot's memory: where each begins, and its bytes."""
    view = memoryview(memory)
    return (view[start : start + size] for start, size in records)


def serve(parent: int, memory: Any) -> None:
    """Answer requests from standard input until the parent closes it, or is gone."""

    def alive() -> None:
        if os.getppid() != parent:  # not only the end of the pipe: forked loader workers may hold it open
            sys.exit(1)

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        while not select.select([requests], [], [], EVERY)[0]:
            alive()
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        skeleton, records = requests.read(request["skeleton"]), request["records"]
        contents = functools.partial(pieces, memory, records)
        done = answer(request["folder"], request["files"], skeleton, [n for _, n in records], contents, alive)
        answers.write(json.dumps(done).encode() + b"\n")
        answers.flush()


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT"):  # they reach the whole group: the parent decides
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent, fd, size = map(int, sys.argv[1:])
    with contextlib.suppress(OSError):  # not allowed here: it then competes as an equal
        os.nice(NICE)
    with contextlib.suppress(BrokenPipeError):
        serve(parent, mmap.mmap(fd, size, prot=mmap.PROT_READ))


if __name__ == "__main__":
    main()
