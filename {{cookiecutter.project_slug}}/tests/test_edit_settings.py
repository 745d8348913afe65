"""Changing a value in config.yaml and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import HOME

from config import Config
from fasttrain import settings
from fasttrain.errors import SettingsError
from fasttrain.tools import edit_settings

OWN = (HOME / "config.yaml").read_bytes().decode()


def test_the_projects_own_file_keeps_every_other_line_and_the_column_of_its_comments(tmp_path: Path) -> None:
    new = edit_settings.changed(OWN, {"data.workers": 12, "run.threads": 3, "data.prefetch_factor": 16})
    pairs = [(a, b) for a, b in zip(OWN.split("\n"), new.split("\n"), strict=True) if a != b]
    assert [(a.split(":")[0].strip(), b.split("#")[0].split()[1]) for a, b in pairs] == [
        ("threads", "3"),
        ("workers", "12"),
        ("prefetch_factor", "16"),
    ]
    assert all(a.index("#") == b.index("#") and a[a.index("#") :] == b[b.index("#") :] for a, b in pairs)
    (tmp_path / "config.yaml").write_text(new)
    old, _ = settings.load(Config, HOME / "config.yaml", ["data.root=/d"])
    found, _ = settings.load(Config, tmp_path / "config.yaml", ["data.root=/d"])
    assert (found.data.workers, found.run.threads, found.data.prefetch_factor) == (12, 3, 16)
    found.data.workers, found.run.threads, found.data.prefetch_factor = None, None, old.data.prefetch_factor
    assert found == old


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("data: {workers: 2, flip: 0.5}  # x\n", "data: {workers: 10, flip: 0.5}  # x\n"),
        ("data:\r\n    workers:   2   # two\r\n", "data:\r\n    workers:   10  # two\r\n"),
        ("data:\n  workers:\n  flip: 1\n", "data:\n  workers: 10\n  flip: 1\n"),
        ("data:\n  workers: '2' # two\n", "data:\n  workers: 10  # two\n"),
        ("data:\n  workers: 2 # two", "data:\n  workers: 10 # two"),
        (
            "\ufeff# é ü 深\ndata:\n  workers: 2\nother: [1,  2]\n",
            "\ufeff# é ü 深\ndata:\n  workers: 10\nother: [1,  2]\n",
        ),
    ],
)
def test_odd_spellings_keep_all_but_the_value(text: str, new: str) -> None:
    assert edit_settings.changed(text, {"data.workers": 10}) == new


def test_what_is_not_there_or_spans_lines_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"data\.worker: is not in"):
        edit_settings.changed(OWN, {"data.worker": 1})
    with pytest.raises(SettingsError, match="spans lines"):
        edit_settings.changed("data:\n  workers: >\n    2\n", {"data.workers": 1})


def test_a_link_and_the_permissions_stay(tmp_path: Path) -> None:
    file, link = tmp_path / "real.yaml", tmp_path / "config.yaml"
    file.write_text("a: 1\n")
    file.chmod(0o640)
    os.symlink(file, link)
    edit_settings.write(link, "a: 2\r\n")
    assert (link.is_symlink(), file.read_bytes(), file.stat().st_mode & 0o777) == (True, b"a: 2\r\n", 0o640)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "real.yaml"]


def test_the_difference_is_the_changed_lines() -> None:
    shown = edit_settings.difference("a: 1\nb: 2\n", "a: 1\nb: 3\n", "config.yaml").splitlines()
    assert shown == ["--- config.yaml", "+++ config.yaml (proposed)", "@@ -2 +2 @@", "-b: 2", "+b: 3"]
