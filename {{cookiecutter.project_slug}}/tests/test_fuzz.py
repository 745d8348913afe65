"""Hostile input by the hundred: what ``make fuzz`` does by the thousand."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import fuzz
import pytest
from fuzz_settings import Settings

from fasttrain.errors import UserError

pytest.importorskip("webdataset")


@pytest.mark.parametrize(("name", "count"), [("settings", 60), ("checkpoint", 100), ("store", 300), ("tar", 300)])
def test_hostile_input_ends_in_one_line_or_in_success(name: str, count: int) -> None:
    outcome = fuzz.run(name, count, seed=1)
    assert not outcome.bad
    assert outcome.read + outcome.refused == count
    assert outcome.refused > count / 5
    assert outcome.read > 0


class Faulty(Settings):
    """Does what no reader may, by turns."""

    name = "faulty"

    def __init__(self, valid: Path) -> None:
        self.number = 0

    def make(self, rng: random.Random, folder: Path) -> None:
        self.number += 1

    def read(self, folder: Path) -> None:
        if self.number == 1:
            raise KeyError("from the depths")
        if self.number == 2:
            raise UserError("two\nlines")
        if self.number == 3:
            os.system("true")
        if self.number == 4:
            (folder.parent / "evil").write_text("")
        if self.number == 5:
            shutil.rmtree(folder.parent / "valid")
        if self.number == 6:
            while True:
                pass
        if self.number == 7:
            os._exit(3)


def test_what_it_looks_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.TARGETS, "faulty", Faulty)
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 0.5)
    monkeypatch.setattr(fuzz, "TOGETHER", 6)
    outcome = fuzz.run("faulty", 6)
    found = [re.match(r"\w+(: [\w.]+| \w+)?", text)[0] for text in outcome.bad.values()]  # type: ignore[index]
    assert found == [
        "KeyError",
        "not one",
        "forbidden: os.system",
        "forbidden: open",
        "forbidden: shutil.rmtree",
        "a hang",
    ]
    monkeypatch.setattr(fuzz, "TOGETHER", 9)
    monkeypatch.setattr(Faulty, "make", lambda self, rng, folder: setattr(self, "number", 7))
    assert fuzz.run("faulty", 2).bad == {0: "a crash, exit code 3", 1: "a crash, exit code 3"}
