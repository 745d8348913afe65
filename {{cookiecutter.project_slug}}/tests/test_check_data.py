"""check-data finds what is wrong with a data set, and its skip list makes it right."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_images import DEEP, KINDS, RGB, TRANSPARENT, saved, ycck

from fasttrain import folder
from fasttrain.errors import UserError
from fasttrain.tools import check_data, check_image, pack

COUNTER = iter(range(250))


def photo() -> bytes:
    """A new image each time."""
    number = next(COUNTER)
    return saved(Image.fromarray(np.full((20, 30, 3), number, np.uint8)), "PNG")


def write(root: Path, name: str, content: bytes | None = None) -> None:
    path = Path(os.path.join(root, name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(photo() if content is None else content)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = check_data.main([*arguments, "--json", "--jobs=1"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def exif(orientation: int) -> bytes:
    table = Image.Exif()
    table[0x0112] = orientation
    return saved(RGB, "JPEG", exif=table)


JPEG = saved(RGB, "JPEG")
FINDINGS = {  # file -> content, what is said of it
    "half.jpg": (JPEG[: len(JPEG) // 2], "broken: is damaged or cut off"),
    "hole.jpg": (JPEG[: len(JPEG) // 2] + b"\xff\xd9", "broken: is damaged or cut off"),
    "empty.JPG": (b"", "broken: is empty (0 bytes)"),
    "text.png": (b"hello", "broken: is not an image"),
    "float.tif": (saved(RGB.convert("F"), "TIFF"), "broken: holds floating point numbers"),
    "half.png": (KINDS["png"][0][:9000], "broken: is damaged or cut off"),
    "cmyk.jpg": (saved(RGB.convert("CMYK"), "JPEG"), "odd: mode CMYK"),
    "ycck.jpg": (ycck(RGB), "odd: mode CMYK"),
    "clear.png": (saved(Image.fromarray(TRANSPARENT), "PNG"), "odd: mode RGBA"),
    "deep.png": (saved(Image.fromarray(DEEP), "PNG"), "odd: mode I;16"),
    "turned.jpg": (exif(6), "odd: turned by EXIF: orientation 6"),
    "other.jpg": (KINDS["png"][0], "odd: wrong extension: is PNG"),
    "dot.png": (saved(Image.new("RGB", (1, 1)), "PNG"), "odd: tiny: 1x1 pixels"),
    "moving.gif": (KINDS["animated gif"][0], "odd: mode P, animated: 2 pictures, the first is used"),
    "moving.webp": (
        saved(RGB, "WEBP", save_all=True, append_images=[RGB.rotate(9)], duration=9),
        "odd: mode RGBA, animated: 2 pictures, the first is used",
    ),
    "fine.jpeg": (JPEG, ""),
    "gray.jpg": (KINDS["gray jpeg"][0], ""),
    "fine.tiff": (saved(RGB, "TIFF"), ""),
}


def test_every_kind_of_finding_is_told_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (content, _) in FINDINGS.items():
        write(tmp_path, f"a/{name}", content)
    code, found = run(capsys, f"data.path={tmp_path}")
    said = {name: f"broken: {reason}" for name, reason in found["broken"].items()}
    said |= {name: f"odd: {', '.join(texts)}" for name, texts in found["odd"].items()}
    assert set(said) == {f"a/{name}" for name, (_, text) in FINDINGS.items() if text}
    for name, (_, text) in FINDINGS.items():
        assert said.get(f"a/{name}", "").startswith(text), said.get(f"a/{name}")
    assert (code, found["files"], found["duplicates"]) == (1, len(FINDINGS), [])


def test_huge_images_are_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_image, "HUGE", 10_000)
    assert check_image.check(JPEG, "x.jpg").odd == ["huge: 200x150 pixels"]


def test_an_unreadable_file_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "a/1.png")
    (tmp_path / "a/2.png").symlink_to(tmp_path / "a/1.png")
    checker = check_image.Checker([folder.scan(tmp_path)])
    (tmp_path / "a/1.png").unlink()
    assert [f.broken for f in checker([0, 1])] == ["can't be read (No such file or directory)"] * 2


def test_a_clean_folder_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(40):
        write(tmp_path, f"train/a/{number}.png")
    write(tmp_path, "val/a/1.png")
    assert check_data.main([f"data.path={tmp_path}", "--jobs=2"]) == 0
    assert capsys.readouterr().out == (
        "41 images: 0 broken, 0 odd, 0 contents more than once, 0 mismatches of classes\n"
    )


def test_duplicates_classes_and_what_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = photo(), photo(), photo()
    for name, content in {
        "train/a/1.png": one, "train/a/2.png": one, "train/a/3.png": one,
        "train/a/4.png": two, "val/a/4.png": two,
        "train/a/5.png": three, "train/b/5.png": three,
    }.items():  # fmt: skip
        write(tmp_path, name, content)
    for name in ("train/a/.hidden.png", "train/a/Thumbs.db", "train/.git/x.png", "train/a/notes.txt", "train/6.png"):
        write(tmp_path, name)
    for name in ("train/c/1.png", "train/b/1.png", "val/new/1.png", "val/b/2.png"):
        write(tmp_path, name)
    code, found = run(capsys, f"data.path={tmp_path}")
    assert code == 1
    assert sorted(found["duplicates"]) == [
        ["train/a/1.png", "train/a/2.png", "train/a/3.png"],
        ["train/a/4.png", "val/a/4.png"],
        ["train/a/5.png", "train/b/5.png"],
    ]
    assert found["classes"] == ["val has classes that train lacks: new", "val lacks classes of train: c"]
    assert found["ignored"] == {"hidden": 3, "other": 1, "outside": 1}

    (tmp_path / "val/new/1.png").unlink()
    shutil.rmtree(tmp_path / "train/c")
    skip = tmp_path / "skip.txt"
    run(capsys, f"data.path={tmp_path}", f"--write-skip-list={skip}")
    assert skip.read_text().split() == [
        "train/a/2.png", "train/a/3.png",  # the first is kept
        "train/a/4.png",  # the validation image is kept
        "train/a/5.png", "train/b/5.png",  # which class is right?
    ]  # fmt: skip
    code, found = run(capsys, f"data.path={tmp_path}", f"data.skip_list={skip}", f"--write-skip-list={skip}")
    assert (code, found["files"], len(skip.read_text().split())) == (0, 4, 5)  # a list in use is kept


@pytest.mark.skipif(os.name == "nt", reason="names are UTF-16 there")
def test_odd_names_go_through_the_skip_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a/new\nline\r.png", r"a/back\nslash\\.png", os.fsdecode(b"a/\xff\xe9.png"), "猫/ü .png"]
    for name in names:
        write(tmp_path, name, b"")
    write(tmp_path, "a/1.png")
    code, found = run(capsys, f"data.path={tmp_path}", f"--write-skip-list={tmp_path / 'skip'}")
    assert (code, set(found["broken"])) == (1, set(names))
    code, found = run(capsys, f"data.path={tmp_path}", f"data.skip_list={tmp_path / 'skip'}")
    assert (code, found["files"]) == (0, 1)
    check_data.main([f"data.path={tmp_path}", "--jobs=1"])
    assert len(capsys.readouterr().out.splitlines()) == 6  # a line each, and two of sums


def test_a_packed_store_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = photo()
    for name in ("a/1.png", "a/2.png"):
        write(tmp_path / "in", name, same)
    write(tmp_path / "in", "a/3.png")
    assert pack.main([str(tmp_path / "in"), str(tmp_path / "out"), "--jobs", "1"]) == 0
    code, found = run(capsys, f"data.path={tmp_path / 'out'}")
    assert (code, found["files"], found["duplicates"]) == (1, 3, [["a/1.png", "a/2.png"]])


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path=fashion_mnist: nothing to check"):
        check_data.main(["data.path=fashion_mnist"])
    with pytest.raises(UserError, match="no class folders"):
        check_data.main([f"data.path={tmp_path}"])
    write(tmp_path, "a/1.png")
    with pytest.raises(UserError, match=r"--write-skip-list .*can't be written"):
        check_data.main([f"data.path={tmp_path}", "--jobs=1", f"--write-skip-list={tmp_path}/none/skip"])
