"""What goes wrong while packing: changed files, a target that can't be written, a full disk, damage found later."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from PIL import Image
from test_pack import content, photos, plan, run

from fasttrain import packed
from fasttrain.errors import UserError
from fasttrain.tools import check_data, pack, pack_store
from fasttrain.tools.pack_source import Form, Packer, from_parts


def half_packed(source: Path, out: Path, count: int) -> None:
    """What a pack leaves that was killed after so many images."""
    found = from_parts(source, None)
    packer = Packer(found, Form("raw", 256, False, 95))
    with pack_store.Writer(out, plan(source), len(found)) as writer:
        for place in range(count):
            writer.add(place, [found.name(place)], [packer.one(place)])
        writer.commit()


def test_files_changed_since_they_were_packed_are_packed_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = photos(tmp_path / "in", 10), tmp_path / "out"
    half_packed(source, out, 6)
    for name in ("a/002.png", "b/009.png"):  # one that was packed, one that wasn't
        Image.new("RGB", (40, 40), (9, 9, 9)).save(source / name)
    assert run(source, out) == 0
    assert "1 files were changed since they were packed, a/002.png for one" in capsys.readouterr().err
    assert run(source, tmp_path / "whole") == 0
    assert content(out) == content(tmp_path / "whole")
    assert (
        packed.load(out).listings["all"].sums.tolist() == packed.load(tmp_path / "whole").listings["all"].sums.tolist()
    )


def test_a_kill_after_a_change_was_noticed_loses_nothing(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in", 10), tmp_path / "out"
    half_packed(source, out, 10)
    Image.new("RGB", (40, 40), (9, 9, 9)).save(source / "a/002.png")
    found = from_parts(source, None)
    with pack_store.Writer(out, plan(source), 10) as writer:
        pack._forget_changed(found, writer)
    with pack_store.Writer(out, plan(source), 10) as writer:
        assert writer.broken == {1: "was changed since it was packed"}
    assert run(source, out) == 0
    assert len(content(out)) == 10


def test_damage_in_a_store_is_found_by_check_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = photos(tmp_path / "in", 10), tmp_path / "out"
    assert run(source, out) == 0
    assert check_data.main([f"data.path={out}", "--jobs=1"]) == 0
    packed.close(out)
    with lmdb.open(str(out), map_size=1 << 30) as env, env.begin(write=True) as transaction:
        value = bytearray(transaction.get(b"a/004.png") or b"")
        value[1000] ^= 1
        transaction.put(b"a/004.png", bytes(value))
    capsys.readouterr()
    assert check_data.main([f"data.path={out}", "--jobs=1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["broken"] == {
        "a/004.png": "is damaged in the packed store (its checksum differs): pack it anew"
    }


def test_a_file_in_the_place_of_the_store_is_left_alone(tmp_path: Path) -> None:
    source, out = photos(tmp_path / "in", 4), tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(UserError, match="out: can't be used: Not a directory"):
        run(source, out)
    with pytest.raises(UserError, match=r"out/below: can't be (used|written)"):
        run(source, out / "below")
    assert out.read_text() == "mine"


# ---- with a file system of its own -----------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", where], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounting here: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_disk_that_fills_up_ends_in_one_line_and_is_gone_on_with(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    source = tmp_path / "in"
    for number in range(40):
        (source / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (100, 200, 3), dtype=np.uint8)).save(source / f"a/{number:02d}.png")
    monkeypatch.setattr(pack, "predict", lambda *a: None)  # as where others fill the disk meanwhile
    monkeypatch.setattr(pack, "TOGETHER", 4)
    monkeypatch.setattr(pack_store, "COMMIT_BYTES", 1)
    with pytest.raises(
        UserError, match=r"can't be written after \d+ of 40 images .*run the same command again"
    ) as caught:
        run(source, disk / "out")
    assert "\n" not in str(caught.value)
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    assert run(source, disk / "out") == 0
    assert run(source, tmp_path / "whole") == 0
    assert content(disk / "out") == content(tmp_path / "whole")


def test_a_disk_that_is_too_small_is_refused_before(disk: Path, tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 300)
    with pytest.raises(UserError, match=r"about 2 MB are needed and \d MB are free"):
        run(source, disk / "out")


def test_a_full_disk_is_told_before_the_database_is_opened(disk: Path, tmp_path: Path) -> None:
    """LMDB writes to its files as memory: it would end the process by a signal, without a word."""
    source = photos(tmp_path / "in", 4)
    (disk / "fill").write_bytes(bytes(2 * 1024**2))
    with pytest.raises(UserError, match=r"out: can't be written: .*No space left"):
        run(source, disk / "out")


def test_a_disk_that_can_not_be_written_is_told(disk: Path, tmp_path: Path) -> None:
    source = photos(tmp_path / "in", 4)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(UserError, match=r"out: can't be written: .*Read-only"):
        run(source, disk / "out")
    with pytest.raises(UserError, match="can't be written: Read-only"):
        check_data.write_skip_list(disk / "skip.txt", {b"a"})
