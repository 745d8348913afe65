"""The before/after table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttrain import history
from fasttrain.errors import UserError
from fasttrain.tools import compare

PHASES = {"wait": 0.0, "copy": 0.0, "forward": 0.05, "backward": 0.03, "optimizer": 0.01, "other": 0.01}


def run(folder: Path, name: str, wait: float, workers: int, batches: int = 10) -> Path:
    path = folder / name
    path.mkdir()
    row = {"epoch": 0, "step": 1, "time": 1.0, "images": 32, **PHASES, "wait": wait, "wall": wait + 0.1, "news": 1}
    lines = [json.dumps({**row, "worker": i % workers, "made": 0.2}) for i in range(batches)]
    (path / "rank0.jsonl").write_text("\n".join(lines) + '\n{"torn')
    validations = [{"time": 1, "event": "validation", "epoch": e, "accuracy": 0.5 + e / 10} for e in range(2)]
    (path / "events0.jsonl").write_text("\n".join(map(json.dumps, validations)))
    (path / "config.yaml").write_text(f"seed: 0\ndata:\n  workers: {workers}\nrun:\n  dir: {path}\n")
    (path / "run.json").write_text('{"world_size": 2}')
    return path


def rows(folder: Path) -> dict[str, list[str]]:
    shown = compare.table([run(folder, "before", 0.3, 1), run(folder, "after", 0.0, 2)])
    columns = [list(column.cells) for column in shown.columns]
    return {str(key): [str(column[i]) for column in columns[1:]] for i, key in enumerate(columns[0])}


def test_what_was_changed_and_what_it_brought_stand_side_by_side(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert found["data.workers"] == ["1", "2"]
    assert "seed" not in found
    assert "run.dir" not in found
    assert found["ms a batch"] == ["400.0", "100.0"]
    assert found["wait"] == ["75.0%", "0.0%"]
    assert found["img/s"] == ["160 (1.00x)", "640 (4.00x)"]
    assert found["data/compute"] == ["2.00", "1.00"]
    assert found["accuracy"] == ["0.6000", "0.6000"]
    assert found["batches"] == ["8", "8"]


@pytest.mark.parametrize(("batches", "says"), [(2, "2 batches are too few"), (0, "0 batches")])
def test_too_few_batches_are_said(tmp_path: Path, batches: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        compare.summary(history.read(run(tmp_path, "short", 0.1, 1, batches)))


def test_a_folder_that_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        compare.table([tmp_path])
