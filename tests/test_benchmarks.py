"""The benchmarks: every competitor gives the same kind of crops, and the tables say what was measured.

Of the competitors only those that are installed are tried: `make bench` installs them, `make test` doesn't.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import measure, results, rows, run  # noqa: E402

FOLDER_ROWS = [row.peer for row in rows.GROUPS[0].rows if row.peer != "torchvision"]  # it is the tuned one, untuned
# In a process of its own, as in the benchmark: crops of an image whose red says the column and whose green the row.
CROPS = """
import itertools, json, os, sys
import numpy as np
from benchmarks import measure
from benchmarks.work import Work
import importlib

work = Work.read(json.loads(sys.argv[2]))
peer = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}")
if hasattr(peer, "prepare"):
    from pathlib import Path
    work = work.with_data(peer.prepare(work, Path(sys.argv[3])))
sizes = []
for batch in itertools.islice(peer.batches(work), 12):
    images = measure.array(batch)
    assert images.dtype == np.uint8
    if images.shape[1] == 3:
        images = images.transpose(0, 2, 3, 1)
    assert images.shape[1:] == (224, 224, 3), images.shape
    across, down = images[:, :, :, 0].astype(float), images[:, :, :, 1].astype(float)
    ends = np.stack([across[:, :, 2].mean(1), across[:, :, -3].mean(1), down[:, 2].mean(1), down[:, -3].mean(1)])
    sizes.append(ends.T)
print(json.dumps(np.concatenate(sizes).tolist()), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 equal images, 320x240: red grows from left to right, green from top to bottom."""
    root = tmp_path_factory.mktemp("ramps")
    across, down = np.meshgrid(np.linspace(0, 255, 320), np.linspace(0, 255, 240))
    Image.fromarray(np.stack([across, down, np.zeros_like(down)], 2).astype(np.uint8)).save(root / "a.jpg", quality=98)
    for number in range(160):
        target = root / "photos" / f"class{number % 2}" / f"{number:03d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(root / "a.jpg", target)
    return root / "photos"


@pytest.fixture(scope="module")
def torchvisions() -> tuple[Any, Any]:
    """Areas and ratios of 4000 crops of such an image, as torchvision draws them."""
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.empty(3, 240, 320)
    drawn = [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    heights, widths = np.array(drawn, float).T[2:]
    return heights * widths / (240 * 320), widths / heights


@pytest.mark.parametrize("peer", FOLDER_ROWS)
def test_every_installed_competitor_draws_crops_of_the_same_distribution(
    peer: str, ramps: Path, torchvisions: tuple[Any, Any], tmp_path: Path
) -> None:
    areas, ratios = torchvisions
    if (lacking := measure.missing(peer)) is not None:
        pytest.skip(f"{lacking} is not installed")
    work = {"photos": str(ramps), "data": str(ramps), "project": str(run.TEMPLATE), "scale": [0.08, 1.0], "batch": 64}
    command = [sys.executable, "-c", CROPS, peer, json.dumps(work), str(tmp_path / "data")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    left, right, top, bottom = np.array(json.loads(done.stdout.splitlines()[-1])).T / 255
    seen = 219 / 224  # of the crop's sides: between the pixels that were looked at
    width, height = abs(right - left) / seen, (bottom - top) / seen
    for found, expected in ((width * height, areas), (width * 320 / (height * 240), ratios)):
        for at in (10, 50, 90):  # per cent
            assert np.percentile(found, at) == pytest.approx(np.percentile(expected, at), abs=0.06)
    assert np.mean(right < left) == pytest.approx(0.5, abs=0.1)  # mirrored
    assert np.mean(top) == pytest.approx(1 - np.mean(bottom), abs=0.05)


def test_a_competitor_that_is_not_installed_or_fails_stays_in_the_table() -> None:
    group = rows.Group(
        "g", "a table", "small", "folder", (rows.PROJECT, rows.Row("a", "one", 2.0), rows.Row("b", "two"))
    )
    ours = run.Result(group.rows[0], speeds=[300.0, 100.0, 200.0], cpu_ms=[1.0, 3.0, 2.0], pixels=0.5)
    theirs = run.Result(group.rows[1], speeds=[100.0, 50.0, 50.0], cpu_ms=[4.0] * 3, convert_seconds=7, megabytes=1234)
    table = results.table(group, [ours, theirs, run.Result(group.rows[2], note="not installed")])
    assert table.rows[0] == ["this project", "200", "100 to 300", "", "", "2.000", "0.50", ""]
    assert table.rows[1] == ["one", "50", "50 to 100", "3.00 times", "2", "4.000", "", "7 s, 1,234 MB"]
    assert table.rows[2][:2] == ["two", "not installed"]
    steps = results.steps_table({"small": {"decode": 0.5}, "camera": {"decode": 5.0}})
    page = results.page([table, steps], argparse.Namespace(rounds=3, seconds=4.0, workers=2), 2, "make bench", 18)
    assert "| two | not installed |" in page
    assert "| decode | 0.500 | 5.000 |" in page
    assert "torch " in page
    console = Console(width=200, record=True, quiet=True)
    console.print(results.shown(table))


def test_a_module_that_is_missing_is_found_without_importing_the_competitor(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.peers import timm

    assert measure.missing("torchvision") is None
    monkeypatch.setattr(timm, "NEEDS", ("not_there.at_all",))
    assert measure.missing("timm") == "not_there.at_all"


def test_every_page_is_read_in_memory_order() -> None:
    images = np.zeros((4, 64, 64, 3), np.uint8)
    images.reshape(-1)[:: measure.PAGE] = 1
    assert measure.touch(images) == measure.touch(images.transpose(0, 3, 1, 2)) == 12


def options_of(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    return run.parser().parse_args(["--work", str(tmp_path / "work"), *arguments])


def test_other_photos_and_another_format_of_stores_have_data_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(photos: str) -> Path:
        return run.Bench(options_of(tmp_path, "--photos", photos), Console(quiet=True)).folder

    monkeypatch.chdir(tmp_path)
    mine = folder(str(tmp_path / "mine"))
    assert mine.parent == tmp_path / "work"
    assert folder("mine") == mine != folder("other")
    monkeypatch.setattr(run, "module", lambda *_: argparse.Namespace(FORMAT="next"))
    assert folder("mine") != mine


@pytest.mark.parametrize(("cores", "workers", "times"), [(8, 2, 2), (2, 8, 2)])
def test_the_limit_has_the_cores_that_the_loaders_use(
    cores: int, workers: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = run.Bench(options_of(tmp_path, "--workers", str(workers)), Console(quiet=True))
    bench.cores = cores
    monkeypatch.setattr(bench, "_child", lambda *_, **__: {"images_per_second": 100.0, "cpu_ms": 10.0})
    group = next(group for group in rows.GROUPS if group.kind == "raw")
    limit, ours = (run.Result(next(row for row in group.rows if row.peer == peer)) for peer in ("limit", "project"))
    for result in (limit, ours):
        bench._measure(group, result, 0)
    assert (limit.speeds, ours.speeds) == ([100.0 * times], [100.0])


def test_the_command_that_results_name_has_no_paths(tmp_path: Path) -> None:
    assert run.command_of(options_of(tmp_path, "--write")) == "make bench WRITE=1"
    mine = options_of(tmp_path, "--photos", str(tmp_path), "--groups", "raw", "--rounds", "5", "--write")
    assert run.command_of(mine) == 'make bench PHOTOS=... WRITE=1 ARGS="--groups raw --rounds 5"'
