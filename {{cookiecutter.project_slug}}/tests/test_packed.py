"""A packed store gives the images of its folder, in every process, and a damaged one is refused in one line."""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from loguru import logger
from PIL import Image
from test_images import KINDS, difference, photo, saved
from torch.utils.data import DataLoader

import data
from config import Config, Data
from fasttrain import folder, images, packed, settings
from fasttrain.errors import UserError
from fasttrain.tools import pack

HOME = Path(data.__file__).parent


@functools.cache
def defaults() -> Data:
    return settings.load(Config, HOME / "config.yaml", [])[0].data


def config(path: Path, **values: Any) -> Data:
    return dataclasses.replace(defaults(), **{"path": str(path), "image_size": 24, **values})


def write(root: Path, name: str, content: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Path:
    out = tmp_path_factory.mktemp("store") / "packed"
    assert pack.main([str(images), str(out), "--jobs", "1"]) == 0
    return out


def copy(store: Path, tmp_path: Path) -> Path:
    out = tmp_path / "copy"
    shutil.copytree(store, out)
    return out


# ---- the same images -------------------------------------------------------------------------------------------------


def test_the_pixels_of_every_kind_of_file_are_those_of_the_folder(tmp_path: Path) -> None:
    for number, (content, _, _) in enumerate(KINDS.values()):
        write(tmp_path / "in", f"a/{number:02d}.jpg", content)  # the extension doesn't matter
    assert pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1"]) == 0
    store = packed.load(tmp_path / "out")
    for number, (content, _, _) in enumerate(KINDS.values()):
        found = store.picture(f"a/{number:02d}.jpg".encode()).pixels()
        assert np.array_equal(found, images.decode(content, 0, "x")), list(KINDS)[number]


@pytest.mark.parametrize(("form", "most"), [("raw", 1.5), ("jpeg", 4)])
@pytest.mark.parametrize("kind", ["jpeg", "cmyk jpeg", "16-bit png", "gray and alpha"])
def test_pixels_are_the_same_within_the_resize(tmp_path: Path, form: str, most: float, kind: str) -> None:
    content = KINDS[kind][0]
    write(tmp_path / "in", "a/1.img.jpg", content)
    assert (
        pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1", "--size", "75", "--format", form]) == 0
    )
    picture = packed.load(tmp_path / "out").picture(b"a/1.img.jpg")
    assert (picture.height, picture.width) == (75, 100)
    whole = images.Picture(content, "x").pixels().astype(float)
    averaged = whole.reshape(75, 2, 100, 2, 3).mean((1, 3))
    assert difference(picture.pixels(), averaged) <= most


def test_a_turned_photo_is_upright_and_a_small_jpeg_is_kept_as_it_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(photo(60, 90), "JPEG", exif=exif)
    write(tmp_path / "in", "a/1.jpg", content)
    for form in ("raw", "jpeg"):
        assert pack.main([str(tmp_path / "in"), str(tmp_path / form), "--jobs", "1", "--format", form]) == 0
        picture = packed.load(tmp_path / form).picture(b"a/1.jpg")
        assert (picture.height, picture.width) == (90, 60)
        assert np.array_equal(picture.pixels(), images.Picture(content, "x").pixels())
    assert bytes(packed.read_value(str(tmp_path / "jpeg"), b"a/1.jpg") or b"") == content


def test_square_keeps_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((50, 120, 3), np.uint8)
    pixels[:, 35:85] = 200
    write(tmp_path / "in", "a/1.png", saved(Image.fromarray(pixels), "PNG"))
    write(tmp_path / "in", "a/2.png", saved(Image.fromarray(pixels[:30, 40:50]), "PNG"))
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1", "--square", "--size", "25"]
    assert pack.main(arguments) == 0
    found = packed.load(tmp_path / "out")
    assert (found.picture(b"a/1.png").pixels() == np.full((25, 25, 3), 200)).all()
    assert found.picture(b"a/2.png").pixels().shape == (10, 10, 3)  # none is enlarged


def test_raw_pixels_are_not_copied(store: Path) -> None:
    picture = packed.load(store).picture(packed.load(store).listings["train"].name(0))
    pixels = picture.pixels()
    assert not pixels.flags.owndata
    assert not pixels.flags.writeable
    assert images.center(picture, 24).pixels().shape == (24, 24, 3)


def test_training_takes_a_store_like_its_folder(store: Path, images: Path) -> None:
    ours, theirs = (data.build(config(path, image_size=64), 0) for path in (store, images))
    assert ours.classes == theirs.classes
    assert (ours.train.stored, theirs.train.stored) == ("raw", None)
    for mine, other in ((ours.train, theirs.train), (ours.val, theirs.val)):
        assert len(mine) == len(other)
        for index in range(0, len(other), 5):
            random.seed(index)
            pixels, label = mine[index]
            random.seed(index)
            expected, wanted = other[index]
            assert label == wanted
            assert np.array_equal(pixels, expected)  # no crop is large enough to decode a JPEG at a half


def test_random_crops_are_still_drawn(store: Path) -> None:
    train = data.build(config(store), 0).train
    assert len({train[0][0].tobytes() for _ in range(6)}) == 6


def test_a_part_is_split_off_and_evaluation_works(tmp_path: Path, images: Path) -> None:
    assert pack.main([str(images / "train"), str(tmp_path / "out"), "--jobs", "1"]) == 0
    cfg, other = config(tmp_path / "out", val_fraction=0.25), config(images / "train", val_fraction=0.25)
    ours, theirs = data.build(cfg, 3), data.build(other, 3)
    assert isinstance(ours.val, data.Images)
    assert isinstance(theirs.val, data.Images)
    assert [ours.val.listing.name(i) for i in range(16)] == [theirs.val.listing.name(i) for i in range(16)]
    everything = data.build_split(cfg, 3, "all", ours.classes[::-1])
    assert (len(everything), everything[0][1]) == (64, 7)
    assert len(data.build_split(cfg, 3, "val", ours.classes)) == 16
    with pytest.raises(UserError, match="split=test"):
        data.build_split(cfg, 3, "test", ours.classes)


def test_any_name_is_a_key(tmp_path: Path) -> None:
    names = ["猫 ü\n/a b.jpg", os.fsdecode(b"\xff\xfe/\xe9.jpg"), "x/" + "y" * 250 + "/" + "z" * 250 + "/" + "n" * 251]
    names += [names[2] + ".jpg", names[2][:-1] + "m.jpg"]
    names.pop(2)
    for number, name in enumerate(names):
        write(tmp_path / "in", name, saved(Image.new("RGB", (9, 9), (number, 0, 0)), "PNG"))
    assert pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1"]) == 0
    store = packed.load(tmp_path / "out")
    assert [int(store.picture(os.fsencode(name)).pixels()[0, 0, 0]) for name in names] == [0, 1, 2, 3]


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_store_read_by_the_parent_is_read_by_its_workers(store: Path, method: str) -> None:
    val = data.build(config(store), 0).val
    before = [val[i] for i in range(8)]
    batches = list(DataLoader(val, 4, num_workers=1, multiprocessing_context=method))
    assert np.array_equal(np.concatenate([b[0].numpy() for b in batches]), np.stack([p for p, _ in before]))
    assert np.concatenate([b[1].numpy() for b in batches]).tolist() == [label for _, label in before]
    assert np.array_equal(val[3][0], before[3][0])  # and the parent reads on


def test_a_grandchild_reads_too(store: Path) -> None:
    val = data.build(config(store), 0).val
    expected = int(val[0][0].sum())
    if (child := os.fork()) == 0:  # pragma: no cover
        good = int(val[0][0].sum()) == expected and packed._opened[str(store)].pid == os.getpid()
        if (grandchild := os.fork()) == 0:
            os._exit(0 if int(val[0][0].sum()) == expected else 1)
        os._exit(0 if good and os.waitpid(grandchild, 0)[1] == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---- what is no store ------------------------------------------------------------------------------------------------


def refused(store: Path) -> str | None:
    """The error of reading all of a store, in a process of its own: a crash would be seen. None: all is well."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            found = packed.load(store)
            for listing in found.listings.values():
                for index in range(len(listing)):
                    found.picture(listing.name(index)).pixels().sum()
            code = 0
        except UserError as error:
            os.write(writer, str(error).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return said or None


def tree_pages(content: bytes | bytearray) -> list[int]:
    """The branch and leaf pages of an LMDB file."""
    kinds = ((page, struct.unpack_from("<QHH", content, page * 4096)) for page in range(2, len(content) // 4096))
    return [page for page, (own, _, kind) in kinds if own == page and kind in (1, 2)]


def test_a_damaged_tree_is_an_error_not_a_crash(tmp_path: Path) -> None:
    for number in range(150):  # enough for a branch page
        content = saved(Image.new("RGB", (30, 30), (number, 0, 0)), "PNG")
        write(tmp_path / "in", f"a/{number:03d}{'n' * 100}.png", content)
    assert pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1"]) == 0
    file, rng = tmp_path / "out/data.mdb", random.Random(0)
    content = file.read_bytes()
    pages = tree_pages(content)
    assert len(pages) > 4
    found = 0
    for attempt in range(120):
        broken, page = bytearray(content), pages[attempt % len(pages)] * 4096
        for _ in range(rng.choice([1, 4, 40])):
            broken[page + rng.randrange(rng.choice([64, 4096]))] = rng.randrange(256)
        file.write_bytes(broken)
        message = refused(tmp_path / "out")
        found += message is not None
        assert message is None or "\n" not in message
    assert found > 30


@pytest.mark.parametrize("field", ["length", "first page"])
def test_a_value_that_would_end_behind_the_file_is_refused(store: Path, tmp_path: Path, field: str) -> None:
    out = copy(store, tmp_path)
    content = bytearray((out / "data.mdb").read_bytes())
    pages = len(content) // 4096
    leaves = [page * 4096 for page in tree_pages(content) if content[page * 4096 + 10] == 2]  # some are not in use
    for page in leaves:
        table = struct.unpack_from("<H", content, page + 12)[0]  # where the table of its nodes ends
        for (at,) in struct.iter_unpack("<H", content[page + 16 : page + table]):
            length, flags, key = struct.unpack_from("<IHH", content, page + at)
            if flags == 1 and field == "length":  # the value has pages of its own
                struct.pack_into("<I", content, page + at, length | 1 << 30)
            elif flags == 1:
                struct.pack_into("<Q", content, page + at + 8 + key, pages)
    (out / "data.mdb").write_bytes(content)
    assert "can't be followed" in (refused(out) or "")


@pytest.mark.parametrize("left", [0, 1, 100, 4096, 5000, 8192, 50_000, -4096, -1])
def test_a_file_that_is_cut_off_is_refused(store: Path, tmp_path: Path, left: int) -> None:
    out = copy(store, tmp_path)
    size = (out / "data.mdb").stat().st_size
    os.truncate(out / "data.mdb", left if left >= 0 else size + left)
    message = refused(out) or ""
    assert str(out) in message
    assert "cut off" in message or "not an LMDB file" in message
    assert "\n" not in message


@pytest.mark.parametrize("garbage", [b"hello", bytes(100_000), random.Random(0).randbytes(100_000)])
def test_garbage_is_refused(tmp_path: Path, garbage: bytes) -> None:
    write(tmp_path, "out/data.mdb", garbage)
    with pytest.raises(UserError, match="not an LMDB file"):
        packed.load(tmp_path / "out")


def test_a_missing_file_is_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="no class folders"):
        data.build(config(tmp_path / "out"), 0)


def change(store: Path, key: bytes, value: bytes | None) -> None:
    with lmdb.open(str(store), map_size=1 << 30) as env, env.begin(write=True) as transaction:
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, value)


def about(store: Path) -> dict[str, Any]:
    with lmdb.open(str(store), readonly=True, lock=False) as env, env.begin() as transaction:
        found: dict[str, Any] = json.loads(transaction.get(packed.ABOUT) or b"")
        return found


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 1}, "format 1, this project reads format 2"),
        ({"complete": False}, "not packed to its end"),
        ({"checksum": "0"}, "checksum differs"),
        ({"classes": ["one"]}, "labels outside"),
        ({"classes": 7}, "damaged"),
        ({"parts": {"train": -1}}, "damaged"),
        ({"parts": {"train": 10**30}}, "damaged"),
        ({"parts": {}}, "damaged"),
        ({"parts": {"train": 71}}, "damaged"),
        ({"form": {"kind": "pickle"}}, "images of kind"),
        ({"form": None}, "damaged"),
    ],
)
def test_a_store_that_does_not_fit_together_is_refused(
    store: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    out = copy(store, tmp_path)
    change(out, packed.ABOUT, json.dumps({**about(out), **changed}).encode())
    with pytest.raises(UserError, match=message) as caught:
        data.build(config(out), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [b"\x80\x04garbage", b"[]", b"[" * 100_000, b"{}", None])
def test_an_lmdb_of_others_is_refused(store: Path, tmp_path: Path, value: bytes | None) -> None:
    out = copy(store, tmp_path)
    change(out, packed.ABOUT, value)
    with pytest.raises(UserError, match=r"not made by|damaged"):
        packed.load(out)


@pytest.mark.parametrize("value", [b"", b"1234567", bytes(8), bytes(500), b"\xff" * 8, None])
def test_one_bad_image_is_named(store: Path, tmp_path: Path, value: bytes | None) -> None:
    out = copy(store, tmp_path)
    listing = packed.load(out).listings["val"]
    packed.close(out)
    change(out, listing.name(2), value)
    val = data.build(config(out), 0).val
    assert len(val[1]) == 2
    with pytest.raises(images.ImageError, match=listing.path(2)):
        val[2]


def test_the_skip_list_leaves_images_out(store: Path, images: Path, tmp_path: Path) -> None:
    names = [b"train/" + folder.scan(images / "train").name(i) for i in (0, 5)]
    (tmp_path / "skip").write_bytes(b"\n".join([*names, b"train/gone.jpg\r", b""]))
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    for path in (store, images):
        sets = data.build(config(path, skip_list=str(tmp_path / "skip")), 0)
        assert isinstance(sets.train, data.Images)
        left = {sets.train.listing.path(i) for i in range(len(sets.train))}
        assert len(sets.train) == 62
        assert not any(os.path.join(path, os.fsdecode(name)) in left for name in names)
    logger.remove(sink)
    assert [w.split(": ", 1)[1] for w in warnings] == [
        f"1 entries are not in {store}: train/gone.jpg",
        f"1 entries are not in {images}: train/gone.jpg",
    ]
