"""What `make planted` plants still fits the owner's files: a change there is seen here, not half an hour later."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import HOME
from planted import Bench, count, verdicts
from plants import HEALTHY, PLANTS, Plant

from fasttrain.judge import CAUSES

FILES = ("train.py", "data.py", "model.py")


@pytest.mark.parametrize("plant", [*PLANTS.values(), *HEALTHY.values()], ids=[*PLANTS, *HEALTHY])
def test_it_fits_the_owners_files(plant: Plant, tmp_path: Path) -> None:
    assert plant.expect in (None, *CAUSES)
    home = plant.write(HOME, tmp_path / "project")
    for name in FILES:
        compile((home / name).read_text(), name, "exec")
    changed = {name for name in FILES if (home / name).read_bytes() != (HOME / name).read_bytes()}
    planted = (("train.py", plant.train), ("data.py", plant.data), ("model.py", plant.model))
    assert changed == {name for name, lines in planted if lines}


def test_a_fault_that_no_longer_fits_is_a_line_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, plant = next(iter(PLANTS.items()))
    odd = replace(plant, train={"not in it": ""})
    assert count(Bench(tmp_path, 0), [(name, odd, 1)]) == 1
    out = capsys.readouterr().out
    assert f"{name}: train.py holds 'not in it' 0 times, expected once" in out
    assert "0 of 1" in out


@pytest.mark.parametrize("name", ["files stay open", "saving in the loop"])
def test_some_are_found_in_real_trainings(name: str, tmp_path: Path) -> None:
    """Those whose evidence is no matter of speed. That each comes first, on an idle machine, is for `make planted`."""
    (verdict,) = verdicts(Bench(tmp_path, 0).run(name, PLANTS[name], seed=0), windows=False)
    assert PLANTS[name].expect in [finding.cause for finding in verdict.findings]


def test_a_name_that_no_kind_has_is_refused() -> None:
    command = [sys.executable, "tests/planted.py", "--only", "jitter,no such kind"]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no kind has 'no such kind' in its name" in done.stderr
    assert all(name in " ".join(done.stderr.split()) for name in (*PLANTS, *HEALTHY))
