"""Packing: it goes on after a kill, refuses what it must not touch, and takes any data set that data.py builds."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import HOME, launch
from PIL import Image

from fasttrain import packed
from fasttrain.errors import UserError
from fasttrain.tools import pack, pack_store, project
from fasttrain.tools.pack_source import Form, Packer, from_parts

# A pack that commits after each image and waits in the middle for the file GO, so that a kill finds it there.
BLOCKED = """
import os, sys, time
from pathlib import Path
from fasttrain.tools import pack, pack_source, pack_store
pack_store.COMMIT_BYTES, pack.TOGETHER = 1, 1
real, go = pack_source.Packer.one, Path(sys.argv.pop(1))
def blocked(self, place):
    while place >= 30 and not go.exists():
        time.sleep(0.01)
    return real(self, place)
pack_source.Packer.one = blocked
pack.predict = lambda *a: None
from fasttrain.run import exits_cleanly
with exits_cleanly():
    sys.exit(pack.main(sys.argv[1:]))
"""


def photos(root: Path, count: int = 60) -> Path:
    rng = np.random.default_rng(0)
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    return root


def run(source: Path, out: Path, *more: str) -> int:
    return pack.main([str(source), str(out), "--jobs", "1", *more])


def content(out: Path) -> dict[bytes, bytes]:
    store = packed.load(out)
    names = [listing.name(i) for listing in store.listings.values() for i in range(len(listing))]
    values = {name: bytes(packed.read_value(str(out), name) or b"") for name in names}
    packed.close(out)
    return values


def stored(out: Path) -> int:
    """Entries that a pack still going on has committed."""
    try:
        size = (out / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0
    return size // 8192  # each image takes two pages


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_pack_goes_on(tmp_path: Path, way: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = photos(tmp_path / "in"), tmp_path / "out"
    go = tmp_path / "go"
    command = [sys.executable, "-c", BLOCKED, str(go), str(source), str(out), "--jobs", "2"]
    process = subprocess.Popen(command, cwd=HOME, stderr=subprocess.PIPE, start_new_session=True, text=True)
    end = time.monotonic() + 60
    while stored(out) < 15 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    os.killpg(process.pid, way) if way == signal.SIGINT else process.send_signal(way)  # Ctrl-C reaches the whole group
    process.wait(60)
    go.touch()  # for workers that outlive it
    said = process.communicate(timeout=60)[1]  # ends only when the workers have gone too: they hold the pipe
    assert process.returncode == (130 if way == signal.SIGINT else -way), said
    assert way != signal.SIGINT or "the same command goes on there" in said
    with pytest.raises(UserError, match="not packed to its end"):
        packed.load(out)
    packed.close(out)

    with pack_store.Writer(out, plan(source), 60) as writer:
        done = writer.done
    assert 5 < done < 60
    assert run(source, out) == 0
    assert run(source, tmp_path / "whole") == 0
    assert content(out) == content(tmp_path / "whole")
    assert sorted(os.listdir(out)) == ["data.mdb"]


def plan(source: Path) -> dict[str, Any]:
    form = Form("raw", 256, False, 95)
    return {"source": str(source), "form": vars(form), "fingerprint": from_parts(source, None).fingerprint()}


def test_what_is_packed_is_not_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = photos(tmp_path / "in", 40), tmp_path / "out"
    monkeypatch.setattr(pack_store, "COMMIT_BYTES", 1)
    seen: list[int] = []
    limit = [20]
    real = Packer.one

    def stops(self: Packer, place: int) -> pack_store.Made:
        if len(seen) == limit[0]:
            raise KeyboardInterrupt
        seen.append(place)
        return real(self, place)

    monkeypatch.setattr(Packer, "one", stops)
    monkeypatch.setattr(pack, "predict", lambda *a: None)
    monkeypatch.setattr(pack, "verify", lambda *a: None)
    with pytest.raises(KeyboardInterrupt):
        run(source, out)
    seen.clear()
    limit[0] = 99
    assert run(source, out) == 0
    assert seen == list(range(16, 40))  # the first 16 went together


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--size", "20"], r"size=256, now size=20"),
        (["--format", "jpeg"], r"kind=raw, now kind=jpeg"),
        (["--square"], "square=False, now square=True"),
        (["--quality", "7"], "quality=95, now quality=7"),
        (["source"], r"source=.*/in, now source=.*/other"),
        (["files"], "other files"),
    ],
)
def test_a_half_packed_store_is_gone_on_with_only_as_it_was_begun(
    tmp_path: Path, change: list[str], message: str
) -> None:
    source, out = photos(tmp_path / "in", 4), tmp_path / "out"
    pack_store.Writer(out, plan(source), 4).close()
    if change == ["source"]:
        source, change = photos(tmp_path / "other", 4), []
    if change == ["files"]:
        (source / "a/002.png").unlink()
        change = []
    with pytest.raises(UserError, match=message):
        run(source, out, *change)


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in", 4), tmp_path / "out"
    assert run(source, out) == 0
    before = (out / "data.mdb").read_bytes()
    with pytest.raises(UserError, match="holds a store already"):
        run(source, out)
    assert (out / "data.mdb").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(UserError, match=r"not empty \(thesis.tex is there\)"):
        run(source, tmp_path / "mine")
    with pytest.raises(UserError, match="lies in the source"):
        run(source, source / "a")
    with pytest.raises(UserError, match="a packed store already"):
        run(out, tmp_path / "again")


def test_two_processes_do_not_pack_into_one_store(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in", 4), tmp_path / "out"
    writer = pack_store.Writer(out, plan(source), 4)
    code, said = launch([sys.executable, "-m", "fasttrain", "pack", str(source), str(out)], HOME)
    writer.close()
    assert (code, "another process is packing" in said) == (1, True)


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos(tmp_path / "in", 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    monkeypatch.setattr(pack_store, "LEAST", 0)
    with pytest.raises(UserError, match="0 MB are needed and 0 MB are free"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_the_size_is_predicted(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = photos(tmp_path / "in", 400), tmp_path / "out"
    assert run(source, out, "--format", form) == 0
    said = capsys.readouterr().err
    predicted = float(said.split("about ")[1].split(" MB")[0])
    assert predicted == pytest.approx((out / "data.mdb").stat().st_size / 1e6, rel=0.1)
    assert "a training sample takes" in said


def test_the_map_grows_when_it_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_store, "_ROOM", 1 << 16)
    source, out = photos(tmp_path / "in", 60), tmp_path / "out"
    assert run(source, out) == 0
    assert len(content(out)) == 60


def test_broken_images_are_listed_and_get_another_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = photos(tmp_path / "in", 20), tmp_path / "out"
    whole = (source / "a/004.png").read_bytes()
    (source / "a/004.png").write_bytes(whole[:900])
    (source / "b/007.png").write_bytes(b"")
    for _ in range(2):
        assert run(source, out) == 1
        said = capsys.readouterr().err
        assert "a/004.png: is damaged" in said
        assert "b/007.png: is empty" in said
        assert "2 broken images: not finished" in said
    (source / "a/004.png").write_bytes(whole)
    assert run(source, out, "--skip-broken") == 0
    said = capsys.readouterr().err
    assert "1 broken images: left out" in said
    listing = packed.load(out).listings["all"]
    assert [listing.name(i) for i in range(len(listing))] == sorted(set(content(out)))
    assert len(listing) == 19
    assert [listing.label(i) for i in (9, 10)] == [0, 1]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_several_processes_give_the_same_store(tmp_path: Path, method: str) -> None:
    source = photos(tmp_path / "in", 40)
    assert run(source, tmp_path / "one") == 0
    more = [f"data.start_method={method}", "--jobs=2"]
    code, said = launch(
        [sys.executable, "-m", "fasttrain", "pack", str(source), str(tmp_path / "two"), *more],
        tmp_path,
        PYTHONPATH=str(HOME),
    )
    assert code == 0, said
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 4)
    dies = BLOCKED.replace("while place >= 30 and not go.exists():", "while os.kill(os.getpid(), 9):")
    code, said = launch(
        [sys.executable, "-c", dies, "no file", str(source), str(tmp_path / "out"), "--jobs", "2"], HOME
    )
    assert code == 1
    assert "error: a worker process died" in said


def test_what_comes_out_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = photos(tmp_path / "in", 4)
    real = pack_store.Writer.add

    def other_pixels(self: pack_store.Writer, first: int, names: Any, made: Any) -> None:
        real(self, first, names, [each._replace(value=each.value[:-1] + b"\x01") for each in made])

    monkeypatch.setattr(pack_store.Writer, "add", other_pixels)
    with pytest.raises(UserError, match="is not what the source gives now"):
        run(source, tmp_path / "out")


def test_names_and_parts_of_the_source_are_kept(tmp_path: Path) -> None:
    for part in ("train", "valid", "test"):
        photos(tmp_path / "in" / part, 4)
    assert run(tmp_path / "in", tmp_path / "out") == 0
    listings = packed.load(tmp_path / "out").listings
    assert {part: listing.name(0) for part, listing in listings.items()} == {
        "train": b"train/a/000.png",
        "val": b"valid/a/000.png",
        "test": b"test/a/000.png",
    }


# ---- data sets of data.py --------------------------------------------------------------------------------------------

OWN = """
class Stored(Dataset[Any]):  # as one would read HDF5 or TFRecord
    def __init__(self, cfg, train): self.cfg, self.train = cfg, train
    def __len__(self): return 6
    def original(self, index): return np.full((30, 40, 3), index, np.uint8), index % 2
    def __getitem__(self, index):
        image, label = self.original(index)
        return images.finished(transform(images.Picture.of(image), self.cfg, self.train)), label


def build(cfg, seed): return Datasets(Stored(cfg, True), Stored(cfg, False), ["even", "odd"])
def build_split(cfg, seed, split, classes): return Stored(cfg, False)
"""


@pytest.mark.parametrize("original", [True, False])
def test_a_data_set_of_the_owner_is_packed(
    changed_project: Callable[[str, str], Path], tmp_path: Path, original: bool
) -> None:
    home = changed_project("data.py", OWN if original else OWN.replace("original", "_own"))
    (tmp_path / "file.h5").touch()
    command = [
        sys.executable,
        "-m",
        "fasttrain",
        "pack",
        str(tmp_path / "file.h5"),
        str(tmp_path / "out"),
        "--jobs",
        "2",
    ]
    code, said = launch(command, home)
    assert code == 0, said
    store = packed.load(tmp_path / "out")
    assert {part: len(listing) for part, listing in store.listings.items()} == {"train": 6, "val": 6}
    assert store.listings["val"].labels.tolist() == [0, 1] * 3
    picture = store.picture(b"val/00000003")
    assert (picture.height, picture.width) == ((30, 40) if original else (40, 40))
    assert (picture.pixels() == 3).all()
    assert ("no original(index)" in said) == (not original)


def test_a_label_outside_the_classes_is_named(changed_project: Callable[[str, str], Path], tmp_path: Path) -> None:
    home = changed_project("data.py", OWN.replace("index % 2", "index"))
    (tmp_path / "file.h5").touch()
    code, said = launch(
        [sys.executable, "-m", "fasttrain", "pack", str(tmp_path / "file.h5"), str(tmp_path / "out"), "--jobs=1"], home
    )
    assert code == 1
    assert re.search(r"error: (train|val)/0000000\d: has label \d, but there are 2 classes", said)


def test_training_and_evaluation_run_on_a_store(train: Any, images: Path, tmp_path: Path) -> None:
    assert run(images, tmp_path / "store") == 0
    done = train("packed", f"data.path={tmp_path / 'store'}", "data.workers=1", "data.warm=true")
    assert done.code == 0, done.output
    assert f"data.warm: reading {tmp_path / 'store'}/data.mdb" in done.output
    code, said = launch([sys.executable, "-m", "fasttrain", "evaluate", str(done.dir / "best.pt"), "--json"], HOME)
    assert code == 0, said
    assert '"images": 8' in said


def test_the_project_is_reached_through_one_module() -> None:
    assert project.HOME == HOME
