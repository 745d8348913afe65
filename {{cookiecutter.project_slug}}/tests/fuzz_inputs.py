"""Valid files, changed at random so that the inside of their readers is reached: checksums are made right again.

A target has `make(rng, folder)`, which writes one input, and `read(folder)`, which reads it as a training does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import torch
from PIL import Image
from torch import nn

from config import Config
from fasttrain import checkpoint, packed, settings, shapes
from fasttrain.parts import Parts
from fasttrain.tools import pack

NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 511, 512, 4095, 4096, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
NUMBERS += [2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -512, -(2**31), -(2**63)]


def changed(rng: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, set, removed, repeated, or the end cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        if not data:
            break
        at, length = rng.randrange(len(data)), rng.choice((1, 1, 2, 4, 8, 64))
        way = rng.randrange(7)
        if way == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif way == 2:
            number = rng.choice(NUMBERS) & (1 << 64) - 1
            size = rng.choice((2, 4, 8))
            data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, rng.choice(("little", "big")))
        elif way == 3:
            del data[at : at + length]
        elif way == 4:
            data[at:at] = data[at : at + length]
        elif way == 5:
            other = rng.randrange(len(data))
            data[at : at + length] = data[other : other + length]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


# ---- settings --------------------------------------------------------------------------------------------------------

TOKENS = [
    *("!!python/object/apply:os.system ['touch ../x']", "!!python/name:os.system", "!!binary aGk=", "!x", "&a [*a, *a]"),
    *("&a", "*a", "<<: *a", "${oc.env:HOME}", "${oc.env:NONE_SUCH}", "${oc.env:HOME,}", "${oc.create:{a: 1}}", "${seed}"),
    *("${oc.decode:1}", "${oc.deprecated:seed}", "${run.dir}", "${data.path}${data.path}", "${${seed}}", "${", "}", "???"),
    *("null", "~", "true", "off", "1e999", "-1e-999", ".inf", "nan", "0x10", "0o17", "1_000", "1:30", "2001-01-01", "[]"),
    *("{}", "[[1]]", "{a: b}", "? a", "- - -", "---", "...", "%YAML 1.1", "\t", "\0", "\x85", "\u2028", "\ufeff", "\r"),
    *("|", ">", '"', "'", '"\\U00110000"', '"\\x00"', "#", ": ", "__class__: x", "a.b: 1", "../../x", "~root/x", "\ud7ff"),
    *("9" * 50, "9" * 5000, "data:", "run: {dir: x}", "seed: 1", "http://x/{0..99999999}.tar", "x{a,b}.tar", "-", "/dev/zero"),
]


class Settings:
    """config.yaml and the command line."""

    name = "settings"

    def __init__(self, valid: Path) -> None:
        self.text = (Path(settings.__file__).parents[1] / "config.yaml").read_text()
        self.keys = [line.split(":")[0].strip() for line in self.text.splitlines() if ":" in line]
        self.overrides: list[str] = []

    def make(self, rng: random.Random, folder: Path) -> None:
        lines = self.text.splitlines()
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            at, token = rng.randrange(len(lines)), rng.choice(TOKENS)
            way = rng.randrange(6)
            if way == 0:
                lines[at] = lines[at].split(":")[0] + ": " + token
            elif way == 1:
                lines.insert(at, rng.choice(("", "  ", "    ")) + token)
            elif way == 2:
                lines[at] += token
            elif way == 3:
                lines[at], lines[0] = lines[0], lines[at]
            elif way == 4:
                lines[at] = " " * rng.randrange(5) + rng.choice(self.keys) + ": " + token
            else:
                cut = rng.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:cut] + token * rng.choice((1, 1, 3, 1000)) + lines[at][cut:]
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
        if rng.random() < 0.02:
            content += rng.choice((b"x: ", b"", b"[", b"- ", b"{a: ", b"&a", b"  ")) * rng.choice((10, 10**4, 10**6, 10**7))
        (folder / "config.yaml").write_bytes(changed(rng, content) if rng.random() < 0.3 else content)
        self.overrides = []
        for _ in range(rng.choice((0, 0, 1, 3))):
            key = rng.choice((rng.choice(self.keys), f"{rng.choice(('data', 'run', 'x', ''))}.{rng.choice(self.keys)}"))
            self.overrides.append(f"{key}{rng.choice(('=', '=', '=', ':', '', '+=', '=='))}{rng.choice(TOKENS)}")

    def read(self, folder: Path) -> None:
        _, saved = settings.load(Config, folder / "config.yaml", self.overrides)
        (folder / "again.yaml").write_text(settings.to_yaml(saved), "utf-8", "surrogateescape")
        settings.load(Config, saved, [])
        settings.load(Config, folder / "again.yaml", [])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Evil:
    """A pickle that calls something."""

    def __init__(self, rng: random.Random) -> None:
        self.call = rng.choice(
            [
                (os.system, ("touch ../evil",)),
                (eval, ("open('../evil', 'w')",)),
                (exec, ("import os; os.mkdir('../evil')",)),
                (bytearray, (1 << 45,)),
                (torch.zeros, (1 << 45,)),
                (shutil.rmtree, ("..",)),
                (getattr, (Path, "touch")),
                (Path.touch, (Path("../evil"),)),
            ]
        )

    def __reduce__(self) -> Any:
        return self.call


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Checkpoint:
    """best.pt and last.pt."""

    name = "checkpoint"

    def __init__(self, valid: Path) -> None:
        valid.mkdir()
        net = _network()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        net(torch.ones(5, 3)).sum().backward()
        optimizer.step()
        facts = {"classes": ["a", "b"], "training_samples": 9, "settings": {"seed": 0, "data": {"path": "x"}}}
        content = {
            "format": checkpoint.FORMAT,
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": {},
            "state": {"epoch": 1, "position": 3, "step": 4, "best": 0.5},
            "metrics": {"accuracy": 0.5},
            "facts": facts,
        }
        self.content = content
        checkpoint.save(valid / "x.pt", content)
        self.whole = (valid / "x.pt").read_bytes()

    def make(self, rng: random.Random, folder: Path) -> None:
        way = rng.randrange(10)
        if way == 0:
            content = changed(rng, self.whole)
        elif way == 1:
            content = pickle.dumps(rng.choice((Evil(rng), {"model": Evil(rng)}, [1], 7)), rng.choice((0, 2, 4)))
        elif way == 2:  # plain data, but not what it should be
            out = io.BytesIO()
            torch.save(_other(rng, self.content), out)
            content = out.getvalue()
        else:
            content = self.repacked(rng, self.whole)
        (folder / "x.pt").write_bytes(content)

    def repacked(self, rng: random.Random, whole: bytes) -> bytes:
        """The archive with one or more of its members changed; zipfile writes the right checksums."""
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w", rng.choice((0, 0, 0, 8))) as new:
            victim = rng.choice(old.namelist())
            for member in old.namelist():
                data, name = old.read(member), member
                if member.endswith("data.pkl") and rng.random() < 0.8:
                    data = self.pickled(rng, data)
                elif member == victim:
                    data = changed(rng, data) if rng.random() < 0.7 else rng.choice((b"", data * 2, bytes(1 << 20)))
                if member == victim and rng.random() < 0.1:
                    name = rng.choice(("../evil", "/evil", "archive/" + "x" * 60000, "archive/data.pkl", "a\0b", "x/data/9"))
                if rng.random() > 0.02:
                    new.writestr(name, data)
        return out.getvalue()

    def pickled(self, rng: random.Random, data: bytes) -> bytes:
        """Its instructions changed, one or a few, or others put in their place."""
        if rng.random() < 0.15:
            deep = rng.choice((1000, 100_000))
            return rng.choice(
                [
                    pickle.dumps(Evil(rng), 2),
                    pickle.dumps({"model": {"x": Evil(rng)}}, 2),
                    b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
                    b"\x80\x02)" + b"\x85" * deep + b".",
                    b"\x80\x02}" + b"r\xff\xff\xff\xff" + b".",
                    b"\x80\x02X\xff\xff\xff\x7fa.",
                    b"\x80\x02\x8b\xff\xff\xff\x7f1.",
                    b"\x80\x02ctorch\nzeros\n" + b"\x8a\x06" + (1 << 45).to_bytes(6, "little") + b"\x85R.",
                    b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.",
                    b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0aK\x01sb.",
                ]
            )
        steps = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
        ends = [at for _, _, at in steps[1:] if at is not None] + [len(data)]
        parts = [data[at:end] for (_, _, at), end in zip(steps, ends, strict=True) if at is not None]
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(parts))
            op, arg, _ = steps[at] if at < len(steps) else steps[-1]
            way = rng.randrange(6)
            if way == 0:
                del parts[at]
            elif way == 1:
                parts.insert(at, rng.choice(parts))
            elif way == 2:
                parts[at] = rng.choice(parts)
            elif way == 3:
                parts[at] = changed(rng, parts[at])
            elif isinstance(arg, int) and not op.name.endswith(("PUT", "GET", "PROTO")):
                parts[at] = pickle.dumps(rng.choice(NUMBERS), 2)[2:-1]
            elif isinstance(arg, str) and " " in arg:  # module and name
                other = rng.choice(("os system", "builtins exec", "torch load", "torch._utils _rebuild_tensor_v2", "a b"))
                parts[at] = b"c" + "\n".join(other.split()).encode() + b"\n"
            elif isinstance(arg, str):
                text = rng.choice((b"", b"../evil", b"\xff", b"x" * 10**6, b"9", b"module.0.weight", b"cuda:7", b"meta"))
                parts[at] = b"X" + struct.pack("<I", len(text)) + text
        return b"".join(parts)

    def read(self, folder: Path) -> None:
        _touch(checkpoint.load(folder / "x.pt"))
        checkpoint.load_weights(_network(), folder / "x.pt")


def _touch(value: Any, depth: int = 0) -> None:
    """Read all numbers of all tensors."""
    if isinstance(value, torch.Tensor):
        value.clone()
    elif isinstance(value, dict) and depth < 9:
        for each in value.values():
            _touch(each, depth + 1)


# ---- packed stores ---------------------------------------------------------------------------------------------------


def _other(rng: random.Random, value: Any) -> Any:
    """Some value in it, or the name of one, replaced."""
    odd = [*NUMBERS, None, True, "", "x", "../../x", "\0", [], {}, [[]], 1.5, float("nan"), "9" * 5000, 10**400]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**{k: v for k, v in value.items() if k != name}, rng.choice((name, name, "x", 7)): _other(rng, value[name])}
    if isinstance(value, torch.Tensor) and rng.random() < 0.7:
        other = value.to(rng.choice((torch.float16, torch.int64, torch.complex64, torch.bool)))
        return rng.choice((other, value[None], value.to("meta"), value.to_sparse(), value * torch.nan))
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _other(rng, value[at]), *value[at + 1 :]]
    return rng.choice(odd)


class Store:
    """data.mdb, as `pack` writes it."""

    name = "store"

    def __init__(self, valid: Path) -> None:
        shapes.draw(valid / "in", seed=1, train_per_class=4, val_per_class=1)
        self.stores = []
        for form in ("raw", "jpeg"):
            pack.say = lambda text: None  # type: ignore[assignment]
            out = valid / form
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
            about, index = json.loads(transaction.get(packed.ABOUT)), transaction.get(packed.INDEX)
            names = [name for name in transaction.cursor().iternext(values=False) if not name.startswith(b"\0")]
            for _ in range(rng.choice((1, 1, 2))):
                way = rng.randrange(5)
                if way == 0:
                    about = _other(rng, about)
                elif way == 1:
                    index = changed(rng, index)
                elif way == 2:
                    name = rng.choice(names)
                    transaction.put(name, changed(rng, transaction.get(name) or b"x"))
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


# ---- tar shards ------------------------------------------------------------------------------------------------------


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
        start, length = rng.choice(((0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (257, 8), (345, 155)))
        text = rng.choice(
            [
                *(b"%011o\0" % n for n in (0, 1, 512, 10 << 30, 8**11 - 1)),
                *((b"\x80" + n.to_bytes(11, "big")) for n in (1 << 40, 1 << 62)),
                *((b"\xff" + (n & (1 << 88) - 1).to_bytes(11, "big")) for n in (-1, -512, -(1 << 62))),
                *(b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"L", b"K", b"x", b"g", b"S", b"V", b"N", b"\0", b"\xff"),
                *(b"../../evil.png", b"/evil.png", b"a.png\0b", b"__x__", b".png", b"a.__key__", b"a.__url__", b"\xff.jpg"),
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


TARGETS: dict[str, Callable[[Path], Any]] = {each.name: each for each in (Settings, Checkpoint, Store, Tar)}
