"""WebDataset shards are trained on like a folder: same pixels, order and steps; faults are named by shard and key."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import io
import json
import os
import random
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HOME, Train
from loguru import logger
from PIL import Image
from test_images import KINDS, saved

import data
from config import Config, Data
from fasttrain import folder, images, packed, remote, settings, shard_index, shards
from fasttrain.errors import SettingsError, UserError
from fasttrain.feed import Feed
from fasttrain.parts import Parts
from fasttrain.tools import check_data, pack

pytest.importorskip("webdataset")


@functools.cache
def defaults() -> Data:
    return settings.load(Config, HOME / "config.yaml", [])[0].data


def config(path: Any, root: Path, **values: Any) -> Data:
    return dataclasses.replace(defaults(), **{"path": str(path), "root": str(root), "image_size": 24, **values})


def png(number: int = 0, size: int = 30) -> bytes:
    return saved(Image.new("RGB", (size, size), (number % 256, number // 256, 7)), "PNG")


def shard(path: Path, members: dict[str, bytes], kind: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def samples(count: int, first: int = 0, classes: int = 2) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    for number in range(first, first + count):
        made[f"{number:05d}.png"], made[f"{number:05d}.cls"] = png(number), str(number % classes).encode()
    return made


def of_folder(images: Path, out: Path) -> Path:
    """The tests' image folder as shards of about 20 samples; the class is the folder's name."""
    for part in ("train", "val"):
        listing = folder.scan(images / part)
        for first in range(0, len(listing), 20):
            members = {}
            for i in range(first, min(first + 20, len(listing))):
                key, _, extension = os.fsdecode(listing.name(i)).replace("/", "_").rpartition(".")
                members[f"{key}.{extension}"] = listing.content(i)
                members[f"{key}.cls"] = listing.classes[listing.label(i)].encode()
            shard(out / f"{part}-{first // 20:03d}.tar", members)
    return out


@pytest.fixture(scope="module")
def tars(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_folder(images, tmp_path_factory.mktemp("tars"))


# ---- a server --------------------------------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    """Sends files, and parts of them unless `ranges` is off; `faults` are answered first."""

    protocol_version = "HTTP/1.1"
    ranges = True
    faults: list[int]
    asked: list[tuple[str, str | None]]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.asked.append((self.path, self.headers.get("Range")))
        path = Path(self.translate_path(self.path))
        if self.faults or not path.is_file():
            self.send_error(self.faults.pop() if self.faults else 404)
            return
        content, version = path.read_bytes(), f'"{path.stat().st_mtime_ns}"'
        size, status = len(content), 200
        if part and self.ranges:
            first, status = int(part[1]), 206
            content = content[first : int(part[2]) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", version)
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        self.end_headers()
        self.wfile.write(content)


@dataclasses.dataclass
class Server:
    url: str
    handler: type[Handler]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """http://.../ is tmp_path."""
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01, 0.01))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    handler = type("Here", (Handler,), {"faults": [], "asked": []})
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(tmp_path)))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{made.server_port}", handler)
    made.shutdown()
    made.server_close()
    thread.join()


# ---- the same as a folder --------------------------------------------------------------------------------------------


def test_samples_labels_and_classes_are_those_of_the_folder(tars: Path, images: Path, tmp_path: Path) -> None:
    ours, theirs = data.build(config(tars, tmp_path), 0), data.build(config(images, tmp_path), 0)
    assert ours.classes == theirs.classes
    for mine, other in ((ours.train, theirs.train), (ours.val, theirs.val)):
        assert len(mine) == len(other)
        for index in range(0, len(other), 5):
            random.seed(index)
            pixels, label = mine[index]
            random.seed(index)
            expected, wanted = other[index]
            assert label == wanted
            assert np.array_equal(pixels, expected)


def test_pixels_of_every_kind_of_file_are_those_of_the_folder_and_the_store(tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for number, (content, _, _) in enumerate(KINDS.values()):
        members |= {f"{number:02d}.jpg": content, f"{number:02d}.cls": b"a"}
    shard(tmp_path / "in/x.tar", members)
    assert pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1", f"data.root={tmp_path}"]) == 0
    listing, store = Parts(tmp_path / "in", None, tmp_path).listing("all"), packed.load(tmp_path / "out")
    for number, (content, _, _) in enumerate(KINDS.values()):
        expected = images.decode(content, 0, "x")
        assert np.array_equal(listing.picture(number).pixels(), expected), list(KINDS)[number]
        assert np.array_equal(store.picture(listing.name(number)).pixels(), expected), list(KINDS)[number]


# ---- few and uneven shards --------------------------------------------------------------------------------------


def test_uneven_shards_with_broken_images_give_equal_steps_on_all_ranks(train: Train, tmp_path: Path) -> None:
    members = samples(10)
    members["00003.png"], members["00007.png"] = members["00003.png"][:60], b""
    shard(tmp_path / "in/train-0.tar", members)
    shard(tmp_path / "in/train-1.tar", samples(4))
    shard(tmp_path / "in/train-2.tar", samples(1))
    shard(tmp_path / "in/val-0.tar", samples(3))
    arguments = [f"data.root={tmp_path}", "data.batch_size=2", "data.workers=1", "data.on_error=skip"]
    done = train("uneven", f"data.path={tmp_path / 'in'}", *arguments, processes=2)
    assert done.code == 0, done.output
    assert [len(done.records(rank)) for rank in (0, 1)] == [4, 4]  # 15 samples are filled up to 16
    said = done.output + (done.dir / "rank1.log").read_text()
    assert "train-0.tar/00003.png: is damaged" in said
    assert "train-0.tar/00007.png: is empty" in said


def test_one_shard_is_shared_by_all_ranks(tmp_path: Path) -> None:
    sets = data.build(config(shard(tmp_path / "train-0.tar", samples(10)), tmp_path), 0)
    cfg = config("", tmp_path, batch_size=2)
    common: dict[str, Any] = {"workers": 0, "epochs": 1, "seed": 0, "world": 2, "device": torch.device("cpu")}
    feeds = [Feed(sets.train, sets.val, cfg, rank=rank, **common) for rank in (0, 1)]
    seen = [[index for batch in feed.train(0) for index in batch.indices] for feed in feeds]
    assert [len(each) for each in seen] == [5, 5]  # 10, of which 1 is split off; 9 are filled up to 10
    assert {*seen[0], *seen[1]} == set(range(9))


def test_too_few_samples_are_said_with_their_number(tmp_path: Path) -> None:
    path = shard(tmp_path / "train-0.tar", samples(1))
    with pytest.raises(UserError, match="1 image can't be split"):
        data.build(config(path, tmp_path), 0)
    shard(path, {"readme.md": b"none"})
    with pytest.raises(UserError, match=r"train-0\.tar: no images in 1 shards"):
        data.build(config(path, tmp_path), 0)


# ---- which shards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("", {"train": 3, "val": 1}),
        ("a-train-{000..001}.tar", {"train": 2}),
        ("a-{train-{000..002},validation-0}.tar", {"train": 3, "val": 1}),
        ("a-train-*.tar", {"train": 3}),
        ("a-train-00[12].tar", {"train": 2}),
        ("a-train-001.tar", {"train": 1}),
        ("a-validation-0.tar", {"all": 1}),
    ],
)
def test_patterns_name_shards_and_their_parts(tmp_path: Path, path: str, parts: dict[str, int]) -> None:
    for name in ("train-000", "train-001", "train-002", "validation-0"):
        shard(tmp_path / f"a-{name}.tar", samples(2))
    where = settings.load(Config, HOME / "config.yaml", [f"data.path={tmp_path / path}"])[0].data.path
    found = Parts(where, None, tmp_path)
    assert {name: len(found.listing(name)) for name in found.names} == {k: 2 * n for k, n in parts.items()}


def test_folders_make_parts(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        shard(tmp_path / f"in/{part}/0.tar", samples(2))
    found = Parts(tmp_path / "in", None, tmp_path)
    assert found.names == ("train", "val", "test")
    assert found.listing("val").name(1) == b"val/0.tar/00001.png"
    assert found.listing("val").path(1) == str(tmp_path / "in/val/0.tar/00001.png")


def test_an_image_folder_with_a_tar_in_it_stays_one(images: Path, tmp_path: Path) -> None:
    (tmp_path / "in").symlink_to(images)
    assert not Parts(tmp_path / "in").shards
    shard(tmp_path / "other/train.tar", samples(2))
    (tmp_path / "other/cat").mkdir()
    assert not shards.is_shards(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none-{0..3}.tar", "none-0.tar: can't be read: No such file"),
        ("none-*.tar", "no tar files are there"),
        ("x-{0..3.tar", "braces that don't fit"),
        ("x-{0..99999999999}.tar", "more than 100000 shards"),
        (
            "x-{{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b},c}.tar",
            "more than",
        ),
        ("{train-0,other}.tar", "neither train, val nor test is in the name of"),
        ("{train-0,train-0}.tar", "more than once"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.build(config(tmp_path / path, tmp_path), 0)


@pytest.mark.parametrize(
    "path", ["pipe:touch {here}/x", "pipe:touch {here}/x.tar", "file:///x.tar", "gs://x/y.tar", "-"]
)
def test_only_files_and_http_are_opened(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = path.replace("{here}", str(tmp_path))
    with pytest.raises(SettingsError, match="expected an existing file or folder, a pattern of tar files"):
        settings.load(Config, HOME / "config.yaml", [f"data.path={path}"])
    for each in (path, path.replace("x", "{x,y}")):
        with pytest.raises(UserError):
            data.build(config(each, tmp_path), 0)
    assert not list(tmp_path.glob("x*"))


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_the_class_comes_from_cls_json_or_txt(tmp_path: Path) -> None:
    for kind, label in {"cls": b"cat\n", "json": b'{"label": "cat", "width": 3}', "txt": b" cat "}.items():
        path = shard(tmp_path / f"{kind}.tar", {"1.jpg": png(), f"1.{kind}": label, "2.png": png(), f"2.{kind}": label})
        listing = Parts(path, None, tmp_path).listing("all")
        assert (listing.classes, listing.labels.tolist()) == (["cat"], [0, 0]), kind


def test_one_class_map_comes_from_training(tmp_path: Path) -> None:
    shard(tmp_path / "in/train-0.tar", {"a.png": png(), "a.cls": b"10", "b.png": png(), "b.cls": b"9"})
    shard(tmp_path / "in/train-1.tar", {"a.png": png(), "a.cls": b"2"})
    shard(tmp_path / "in/val-0.tar", {"a.png": png(), "a.cls": b"10"})
    sets = data.build(config(tmp_path / "in", tmp_path), 0)
    assert sets.classes == ["2", "9", "10"]  # numbers in their order
    assert [sets.train[i][1] for i in range(3)] == [2, 1, 0]
    assert sets.val[0][1] == 2
    shard(tmp_path / "in/val-0.tar", {"a.png": png(), "a.cls": b"11"})
    with pytest.raises(UserError, match="11 not among the 3 classes of the training images"):
        data.build(config(tmp_path / "in", tmp_path), 0)


@pytest.mark.parametrize(
    "label", [{}, {"a.cls": b""}, {"a.cls": b"\xff"}, {"a.json": b'{"x": 1}'}, {"a.json": b"[" * 9999}, {"b.cls": b"1"}]
)
def test_a_sample_without_a_class_is_named(tmp_path: Path, label: dict[str, bytes]) -> None:
    path = shard(tmp_path / "x.tar", {"a.png": png(), **label})
    with pytest.raises(UserError, match=r"x\.tar/a\.png: no class"):
        Parts(path, None, tmp_path).listing("all")


# ---- damage -----------------------------------------------------------------------------------------------------


def test_a_broken_image_is_named_by_shard_and_key(tmp_path: Path) -> None:
    path = shard(tmp_path / "x.tar", samples(6) | {"00003.png": png()[:60]})
    sets = data.build(config(path, tmp_path), 0)
    with pytest.raises(images.ImageError, match=re.escape(f"{path}/00003.png") + ": is damaged"):
        [sets.train[i] for i in range(5)]


def test_check_data_finds_it_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = samples(8) | {"00005.png": png()[:60]}
    members["00006.png"] = members["00004.png"]
    shard(tmp_path / "in/train-0.tar", members)
    shard(tmp_path / "in/val-0.tar", samples(4, first=50))
    arguments = [f"data.path={tmp_path / 'in'}", f"data.root={tmp_path}", "--json", "--jobs=1"]
    assert check_data.main([*arguments, "--write-skip-list", str(tmp_path / "skip")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] == {"train-0.tar/00005.png": "is damaged or cut off (image file is truncated)"}
    assert found["duplicates"] == [["train-0.tar/00004.png", "train-0.tar/00006.png"]]
    sets = data.build(config(tmp_path / "in", tmp_path, skip_list=str(tmp_path / "skip")), 0)
    assert len(sets.train) == 6


@pytest.mark.parametrize("cut", [0, 700, 2000, 5632, 5700, 6144, 6500, 6656, 7000])
def test_a_shard_that_is_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    path = shard(tmp_path / "x.tar", {"a.png": os.urandom(5000), "a.cls": b"1"})  # 512 + 5120 + 512 + 512, end
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"x\.tar: not a whole tar file"):
        Parts(path, None, tmp_path).listing("all")


def test_garbage_behind_a_member_is_no_end(tmp_path: Path) -> None:
    path = shard(tmp_path / "x.tar", samples(2))
    content = bytearray(path.read_bytes())
    content[2048 : 2048 + 512] = random.Random(0).randbytes(512)  # the header of the second image
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.tar: not a whole tar file \(no end mark"):
        Parts(path, None, tmp_path).listing("all")


def test_a_shard_that_shrinks_later_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "x.tar", samples(3))
    listing = Parts(path, None, tmp_path).listing("all")
    os.truncate(path, 700)
    with pytest.raises(images.ImageError, match=r"x\.tar/00002\.png: its shard is cut off"):
        listing.content(2)
    path.unlink()
    with pytest.raises(images.ImageError, match=r"x\.tar/00002\.png: can't be read \(No such file"):
        listing.content(2)


@pytest.mark.parametrize(
    "content", [b"", b"hello", bytes(4096), random.Random(0).randbytes(4096), b"\x1f\x8b\x08" * 400]
)
def test_what_is_no_tar_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.tar: (not a whole tar file|no images)"):
        Parts(tmp_path / "x.tar", None, tmp_path).listing("all")


# ---- hostile ---------------------------------------------------------------------------------------------------------


def test_hostile_members_are_read_as_nothing_but_bytes(tmp_path: Path) -> None:
    path = tmp_path / "in/x.tar"
    shard(path, {"/etc/../../evil.png": png(3), "/etc/../../evil.cls": b"0"})
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo(f"link{kind.decode()}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        for name in ("code.pyd", "code.pkl", "code.pth"):
            tar.addfile(tarfile.TarInfo(name))
    before = sorted(tmp_path.rglob("*"))
    listing = Parts(path).listing("all")
    assert [listing.name(i) for i in range(len(listing))] == [b"x.tar//etc/../../evil.png"]
    assert int(listing.picture(0).pixels()[0, 0, 0]) == 3
    assert sorted(tmp_path.rglob("*")) == before


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "content",
    [
        header("a.png", 10 << 30),  # no such bytes behind it
        header("a.png", -512),
        header("././@LongLink", 10 << 30, tarfile.GNUTYPE_LONGNAME),
        header("x", 10 << 30, tarfile.XHDTYPE),
        header("x", 512, tarfile.XHDTYPE) * 5000,  # headers of headers
        header("x", -512, tarfile.XHDTYPE),
    ],
    ids=["huge", "negative", "long name", "huge extension", "nested", "negative extension"],
)
def test_headers_that_lie_are_refused_quickly(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(content + bytes(1024))
    os.truncate(path, 12 << 30)  # a file with a hole: nothing of it is on the disk
    if content == header("a.png", 10 << 30):
        os.truncate(path, 4096)
    with pytest.raises(UserError, match=r"x\.tar: (not a whole tar file|no images)"):
        Parts(path).listing("all")


def test_an_image_of_gigabytes_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(header("a.png", 4 << 30))
    os.truncate(path, 512 + (4 << 30))
    with path.open("ab") as file:
        file.write(header("a.cls", 1) + b"1".ljust(512, b"\0") + bytes(1024))
    with pytest.raises(images.ImageError, match=r"x\.tar/a\.png: is too large"):
        Parts(path).listing("all").content(0)


# ---- the index -------------------------------------------------------------------------------------------------------


def test_the_index_is_kept_and_made_anew_when_a_shard_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "x.tar", samples(3))
    read: list[str] = []
    real = shard_index._samples
    monkeypatch.setattr(shard_index, "_samples", lambda each: read.append(each.path) or real(each))  # type: ignore[func-returns-value]
    first = Parts(path, None, tmp_path).listing("all")
    second = Parts(path, None, tmp_path).listing("all")
    assert len(read) == 1
    assert second.content(2) == first.content(2)
    assert (second.classes, second.name(1)) == (first.classes, first.name(1))
    shard(path, samples(5))
    assert len(Parts(path, None, tmp_path).listing("all")) == 5
    assert len(read) == 2
    for kept in (tmp_path / "shards").iterdir():
        damaged = bytearray(kept.read_bytes())
        damaged[-1] ^= 1  # in a name
        kept.write_bytes(damaged)
    assert len(Parts(path, None, tmp_path).listing("all")) == 5
    assert len(read) == 3


def test_without_the_library_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "x.tar", samples(3))
    monkeypatch.setitem(__import__("sys").modules, "webdataset.tariterators", None)
    with pytest.raises(UserError, match="pip install webdataset"):
        Parts(path, None, None).listing("all")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_kind(tmp_path: Path, kind: int) -> None:
    key = "d" * 90 + "/" + ("n" * 90 if kind == tarfile.USTAR_FORMAT else "猫" * 60)
    path = shard(tmp_path / "x.tar", {f"{key}.PNG": png(5), f"{key}.cls": b"1", "__meta__.json": b"{}"}, kind)
    listing = Parts(path, None, tmp_path).listing("all")
    assert listing.name(0).decode() == f"x.tar/{key}.png"
    assert int(listing.picture(0).pixels()[0, 0, 0]) == 5


# ---- http ------------------------------------------------------------------------------------------------------------


def test_shards_behind_urls_give_the_same(tars: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(tars)
    url = f"{server.url}/s/{{train-{{000..003}},val-000}}.tar"
    ours = data.build(config(url, tmp_path), 0)
    theirs = data.build(config(tars, tmp_path), 0)
    assert ours.classes == theirs.classes
    assert isinstance(ours.train, data.Images)
    assert isinstance(theirs.train, data.Images)
    assert len(ours.train) == len(theirs.train) == 64
    server.handler.asked.clear()
    ours.train.prefetch(range(64))
    assert len(server.handler.asked) == 4  # each shard's in one request
    assert all(ours.train.listing.content(i) == theirs.train.listing.content(i) for i in range(64))
    assert len(server.handler.asked) == 4
    assert len(ours.val) == 8
    assert not list(tmp_path.glob("shards/*.tar"))  # nothing but the index is kept


def test_training_on_urls_equals_training_on_the_folder(
    train: Train, tars: Path, server: Server, tmp_path: Path
) -> None:
    """The order of the samples, the draws and the labels are the same, so the weights are."""
    (tmp_path / "s").symlink_to(tars)
    url = f"{server.url}/s/{{train-{{000..003}},val-000}}.tar"
    remotely = train("urls", f"data.path={url}", f"data.root={tmp_path}", "data.workers=1", no_proxy="*")
    locally = train("folder")
    assert remotely.code == 0, remotely.output
    ours, theirs = remotely.checkpoint()["model"], locally.checkpoint()["model"]
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_urls_are_packed(tars: Path, server: Server, tmp_path: Path) -> None:
    (tmp_path / "s").symlink_to(tars)
    url = f"{server.url}/s/{{train-{{000..003}},val-000}}.tar"
    assert pack.main([url, str(tmp_path / "out"), "--jobs", "1", f"data.root={tmp_path}"]) == 0
    store = packed.load(tmp_path / "out")
    assert {part: len(listing) for part, listing in store.listings.items()} == {"train": 64, "val": 8}
    local = Parts(tars).listing("val")
    assert np.array_equal(store.listings["val"].picture(3).pixels(), local.picture(3).pixels())


def test_a_server_without_parts_of_files_is_read_once(server: Server, tmp_path: Path) -> None:
    shard(tmp_path / "s/train-0.tar", samples(3))
    server.handler.ranges = False
    for _ in range(2):
        listing = Parts(f"{server.url}/s/train-0.tar", None, tmp_path).listing("train")
        assert int(listing.picture(2).pixels()[0, 0, 0]) == 2
        assert listing.path(2) == f"{server.url}/s/train-0.tar/00002.png"
    assert len([part for _, part in server.handler.asked if part is None]) == 1
    assert len(list(tmp_path.glob("shards/*.tar"))) == 1


def test_no_room_for_whole_files_is_said_with_the_numbers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard(tmp_path / "s/train-0.tar", samples(3))
    server.handler.ranges = False
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no room for it: 0 MB needed, 0 MB free"):
        Parts(f"{server.url}/s/train-0.tar", None, tmp_path).listing("train")
    assert not list(tmp_path.glob("shards/*"))


def test_a_server_that_fails_now_and_then_is_asked_again(server: Server, tmp_path: Path) -> None:
    shard(tmp_path / "s/train-0.tar", samples(3))
    server.handler.faults += [503, 500]
    listing = Parts(f"{server.url}/s/train-0.tar", None, tmp_path).listing("train")
    server.handler.faults += [503, 500, 429]
    assert listing.picture(1).height == 30


def test_what_a_server_can_not_give_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/s/train-0\.tar: the server answers 404"):
        Parts(f"{server.url}/s/train-0.tar", None, tmp_path).listing("train")
    path = shard(tmp_path / "s/train-0.tar", samples(3))
    listing = Parts(f"{server.url}/s/train-0.tar", None, tmp_path).listing("train")
    server.handler.faults += [503] * 4
    with pytest.raises(images.ImageError, match=r"train-0\.tar/00001\.png: can't be read \(the server answers 503"):
        listing.content(1)
    shard(path, samples(4))
    with pytest.raises(images.ImageError, match=r"00001\.png: can't be read \(was changed on the server"):
        listing.content(1)
    with pytest.raises(UserError, match=r"train-0\.tar: (\[Errno|Connection refused)"):
        Parts("http://127.0.0.1:1/train-0.tar", None, tmp_path).listing("train")


def test_redirections_lead_to_http_only(server: Server, tmp_path: Path) -> None:
    shard(tmp_path / "s/train-0.tar", samples(3))
    target = {
        "/good.tar": "/s/train-0.tar",
        "/bad.tar": f"file://{tmp_path}/s/train-0.tar",
        "/ftp.tar": "ftp://x/y.tar",
    }

    def redirected(self: Any) -> None:
        if self.path not in target:
            Handler.do_GET(self)
            return
        self.send_response(302)
        self.send_header("Location", target[self.path])
        self.send_header("Content-Length", "0")
        self.end_headers()

    server.handler.do_GET = redirected  # type: ignore[method-assign]
    assert len(Parts(f"{server.url}/good.tar", None, tmp_path).listing("all")) == 3
    for name in ("bad", "ftp"):
        with pytest.raises(UserError, match=rf"/{name}\.tar: "):
            Parts(f"{server.url}/{name}.tar", None, tmp_path).listing("all")


def test_left_out_samples_are_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    path = shard(tmp_path / "x.tar", samples(2) | {"text.txt": b"no image"})
    assert len(Parts(path, None, tmp_path).listing("all")) == 2
    logger.remove(sink)
    assert said == [f"{path}: 1 samples without an image are left out"]
