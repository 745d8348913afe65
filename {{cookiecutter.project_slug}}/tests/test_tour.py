"""The tour: its photos, and the order of what it shows. Its parts have their own tests (tune, pack, judge)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import pytest

from fasttrain.errors import UserError
from fasttrain.tools import photos, project, tour
from fasttrain.tools.trials import Measured
from fasttrain.tools.tune import Outcome


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}


def test_photos_have_the_size_and_weight_of_a_cameras_and_are_the_same_each_time(tmp_path: Path) -> None:
    mean = photos.make(tmp_path / "a", 3, jobs=1)
    found = files(tmp_path / "a")
    assert list(found) == ["class00/00000.jpg", "class01/00001.jpg", "class02/00002.jpg"]
    assert len(set(found.values())) == 3
    image = cv2.imread(str(tmp_path / "a/class00/00000.jpg"))
    assert image is not None
    assert image.shape == (1066, 1600, 3)
    assert 380_000 < mean < 460_000
    photos.make(tmp_path / "b", 3, jobs=1)
    assert files(tmp_path / "b") == found


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A tour whose runs, tune and pack are played; the settings of each run."""
    settings: list[list[str]] = []

    class Runs:
        def __init__(self, overrides: Sequence[str], folder: Path, seconds: float) -> None:
            self.overrides = list(overrides)

        def measure(self, changes: Sequence[str] = ()) -> tuple[Measured, Path]:
            settings.append([*self.overrides, *changes])
            packed = any(each.endswith("store") for each in changes)
            return Measured(
                300.0 if packed else 100.0, 0.1, 0.01 if packed else 0.6, 0.99 if packed else 0.4, 20, 2.0
            ), tmp_path

    def tune(overrides: Sequence[str], *_: Any) -> Outcome:
        settings.append(list(overrides))
        after = Measured(250.0, 0.12, 0.02, 0.96, 20, 2.0)
        return Outcome(
            [Measured(100.0, 0.3, 0.6, 0.4, 20, 2.0)] * 3, [after] * 3, {"data.workers": 2}, {"data.workers": 0}
        )

    def pack(root: Path, store: Path, output: Path) -> None:
        store.mkdir()
        (store / "data.mdb").write_bytes(b"x" * 5_000_000)

    monkeypatch.setattr(project, "HOME", tmp_path)
    monkeypatch.setattr(tour, "Runs", Runs)
    monkeypatch.setattr(tour, "tune", tune)
    monkeypatch.setattr(tour, "_pack", pack)
    monkeypatch.setattr(tour, "verdict", lambda run: ["verdict: the loader is too slow", "  do: data.workers: 0 -> 2"])
    return settings


def test_the_way_goes_from_no_workers_over_tune_and_pack_and_ends_in_a_table(
    played: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    assert tour.main(["--photos", str(tmp_path / "mine"), "seed=3"]) == 0
    out = capsys.readouterr().out
    assert out.index("1. The report") < out.index("verdict: the loader") < out.index("2. python -m fasttrain tune")
    assert out.index("3. python -m fasttrain pack") < out.index("4. The same") < out.index("The whole way")
    assert "stand-in: it sleeps 80 ms" in out
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in out.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["data.workers"]] == ["0", "2", "2"]
    assert [cell.strip() for cell in rows["device busy"]] == ["40.0%", "40.0%", "99.0%"]  # of the second table
    assert "device busy 40% -> 96% -> 99%, 3.0 times the images a second" in out
    before, tuned, packed, *held = played
    assert all("data.workers=0" in each and "seed=3" in each for each in played)
    assert before == tuned
    assert packed[-2] == "data.workers=2"
    assert packed[-1].startswith("data.path=")
    assert [tour.HOLDS in each for each in held] == [True] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_what_the_proof_rejects_is_not_shown_as_tuned(
    played: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, tried = Measured(100.0, 0.3, 0.6, 0.4, 20, 2.0), Measured(250.0, 0.12, 0.02, 0.96, 20, 2.0)
    monkeypatch.setattr(tour, "tune", lambda *_: Outcome([before], [tried], {}, {"data.workers": 0}))
    (tmp_path / "mine").mkdir()
    assert tour.main(["--photos", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert "device busy 40% -> 40% -> 99%, 3.0 times the images a second" in out
    row = next(line for line in out.splitlines() if line.startswith("│ data.workers"))
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["0", "0", "0"]


def test_a_folder_that_is_not_there_is_said(played: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder of photos"):
        tour.main(["--photos", str(tmp_path / "nowhere")])
    assert list(tmp_path.iterdir()) == []
