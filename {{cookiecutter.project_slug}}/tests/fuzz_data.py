"""Packed stores and tar shards made to do harm, with the right checksums."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import struct
import tarfile
from pathlib import Path

import lmdb
from fuzz_changes import NUMBERS, changed, other
from PIL import Image

from fasttrain import packed, shapes
from fasttrain.parts import Parts
from fasttrain.tools import pack

# Of a tar header: begin and length of name, mode, size, kind, link, magic and prefix.
FIELDS = [(0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (257, 8), (345, 155)]


class Store:
    """data.mdb, as `pack` writes it."""

    name = "store"

    def __init__(self, valid: Path) -> None:
        shapes.draw(valid / "in", seed=1, train_per_class=4, val_per_class=1)
        self.stores = []
        for form in ("raw", "jpeg"):
            out = valid / form
            with contextlib.redirect_stderr(io.StringIO()):
                pack.main([str(valid / "in"), str(out), "--jobs", "1", "--size", "20", "--format", form])
            packed.close(out)
            self.stores.append((out / "data.mdb").read_bytes())

    def make(self, rng: random.Random, folder: Path) -> None:
        shutil.rmtree(folder / "store", ignore_errors=True)
        (folder / "store").mkdir()
        content = bytearray(rng.choice(self.stores))
        way = rng.randrange(4)
        if way == 0:
            content = bytearray(changed(rng, bytes(content)))
        elif way == 1:
            for _ in range(rng.choice((1, 1, 3))):
                self.page(rng, content)
        (folder / "store/data.mdb").write_bytes(content)
        if way >= 2:
            self.entries(rng, folder / "store")

    def page(self, rng: random.Random, content: bytearray) -> None:
        """A page that LMDB follows, or one of its two headers: mostly whole numbers."""
        kinds = [(page, struct.unpack_from("<H", content, page * 4096 + 10)[0]) for page in range(len(content) // 4096)]
        at = rng.choice([page for page, kind in kinds if kind in (1, 2, 8)]) * 4096
        field = rng.choice((at + 2 * rng.randrange(64), at + 2 * rng.randrange(2048)))
        if rng.random() < 0.3:
            content[at : at + 4096] = changed(rng, bytes(content[at : at + 4096]))[:4096].ljust(4096, b"\0")
        else:
            size = rng.choice((2, 4, 8))
            value = rng.choice((*NUMBERS, *range(2, 12), rng.randrange(4096))) & (1 << 8 * size) - 1
            content[field : field + size] = value.to_bytes(size, "little")[: len(content) - field]

    def entries(self, rng: random.Random, out: Path) -> None:
        """What lies in it, written by LMDB itself, with the right checksum."""
        with lmdb.open(str(out), map_size=1 << 26, sync=False, lock=False) as env, env.begin(write=True) as transaction:
            about, index = json.loads(transaction.get(packed.ABOUT) or b""), transaction.get(packed.INDEX) or b""
            names = [name for name in transaction.cursor().iternext(values=False) if not name.startswith(b"\0")]
            for _ in range(rng.choice((1, 1, 2))):
                way = rng.randrange(5)
                if way == 0:
                    about = other(rng, about)
                elif way == 1:
                    index = changed(rng, index)
                elif way == 2:
                    name = rng.choice(names)
                    transaction.put(name, changed(rng, transaction.get(name) or b""))
                elif way == 3:
                    shape = struct.pack("<II", *(rng.choice(NUMBERS) & 0xFFFFFFFF for _ in "hw"))
                    transaction.put(rng.choice(names), shape + bytes(rng.choice((0, 3, 1200))))
                else:
                    transaction.delete(rng.choice(names))
            if isinstance(about, dict) and rng.random() < 0.9:
                about["checksum"] = hashlib.blake2b(index, digest_size=16).hexdigest()
            said = json.dumps(about).encode()
            transaction.put(packed.ABOUT, changed(rng, said) if rng.random() < 0.1 else said)
            transaction.put(packed.INDEX, index)

    def read(self, folder: Path) -> None:
        try:
            parts = Parts(folder / "store")
            for part in parts.names:
                listing = parts.listing(part)
                for index in range(len(listing)):
                    listing.picture(index).pixels().sum()
        finally:
            packed.close(folder / "store")


class Tar:
    """WebDataset shards, and the index that is kept of them."""

    name = "tar"

    def __init__(self, valid: Path) -> None:
        valid.mkdir()
        self.tars = [self.archive(kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
        (valid / "x.tar").write_bytes(self.tars[0])

    def archive(self, kind: int) -> bytes:
        out = io.BytesIO()
        long = "" if kind == tarfile.USTAR_FORMAT else "long/" * 40 + "猫"
        with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
            for number in range(4):
                image = io.BytesIO()
                Image.new("RGB", (9, 9), (number, 0, 0)).save(image, ("PNG", "JPEG")[number % 2])
                extra = ("cls", "json", "txt")[number % 3]
                label = b'{"label": 1}' if extra == "json" else b"1"
                for end, content in ((("png", "jpg")[number % 2], image.getvalue()), (extra, label)):
                    member = tarfile.TarInfo(f"{long}{number}.{end}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        return out.getvalue()[: 512 * (2 + len(out.getvalue().rstrip(b"\0")) // 512 + 1)]

    def make(self, rng: random.Random, folder: Path) -> None:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        content = rng.choice(self.tars)
        way = rng.randrange(6)
        if way == 0:
            content = changed(rng, content)
        elif way <= 4:
            blocks = bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 5))):
                self.header(rng, blocks)
            content = bytes(blocks)
        (folder / "x.tar").write_bytes(content)
        if rng.random() < 0.02:
            os.truncate(folder / "x.tar", 10 << 30)  # a hole
        if way == 5:  # the index that was kept, with a right checksum
            Parts(folder / "x.tar", None, folder).listing("all")
            (kept,) = (folder / "shards").iterdir()
            body = changed(rng, kept.read_bytes()[16:])
            kept.write_bytes(hashlib.blake2b(body, digest_size=16).digest() + body)

    def header(self, rng: random.Random, content: bytearray) -> None:
        """A field of a header changed, its checksum made right."""
        places = [at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"]
        if not places:
            return
        at = rng.choice(places)
        start, length = rng.choice(FIELDS)
        text = rng.choice(
            [
                *(b"%011o\0" % n for n in (0, 1, 512, 10 << 30, 8**11 - 1)),
                *((b"\x80" + n.to_bytes(11, "big")) for n in (1 << 40, 1 << 62)),
                *((b"\xff" + (n & (1 << 88) - 1).to_bytes(11, "big")) for n in (-1, -512, -(1 << 62))),
                *(b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"L", b"K", b"x", b"g", b"S", b"V", b"N", b"\0", b"\xff"),
                *(
                    b"../../evil.png",
                    b"/evil.png",
                    b"a.png\0b",
                    b"__x__",
                    b".png",
                    b"a.__key__",
                    b"a.__url__",
                    b"\xff.gif",
                ),
                rng.randbytes(length),
            ]
        )
        content[at + start : at + start + length] = text[:length].ljust(length, b"\0")
        if rng.random() < 0.3 and at + 1024 <= len(content):  # what follows: perhaps the records of a PAX header
            content[at + 512 : at + 1024] = changed(rng, bytes(content[at + 512 : at + 1024]))[:512].ljust(512, b"\0")
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])

    def read(self, folder: Path) -> None:
        listing = Parts(folder / "x.tar", None, folder if (folder / "shards").exists() else None).listing("all")
        for index in range(len(listing)):
            listing.picture(index).pixels()
            listing.label(index)
            listing.path(index)
