"""What the tests share: a clean copy of the template, and projects baked from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
# What a training, a test or a tool leaves in the template folder while one works on it. A clone does not have it.
LEFTOVERS = ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "runs", "data", "*.egg-info")

Bake = Callable[..., Path]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template as a clone has it."""
    clone = tmp_path_factory.mktemp("clone") / "fasttrain-template"
    clone.mkdir()
    for name in (FOLDER, "hooks", "templates"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns(*LEFTOVERS))
    shutil.copy(ROOT / "cookiecutter.json", clone)
    return clone


@pytest.fixture(scope="session")
def cookiecutter_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings for cookiecutter that keep it from reading or writing anything in the home folder."""
    folder = tmp_path_factory.mktemp("cookiecutter")
    file = folder / "config.yaml"
    file.write_text(f"replay_dir: {folder / 'replay'}\ncookiecutters_dir: {folder / 'clones'}\n")
    return file


@pytest.fixture(scope="session")
def bake(template: Path, cookiecutter_config: Path) -> Bake:
    """`bake(folder, field=answer, ...)` bakes into the folder without asking and gives the project's path."""

    def run(folder: Path, *, overwrite_if_exists: bool = False, **answers: Any) -> Path:
        project = cookiecutter(
            str(template),
            no_input=True,
            extra_context=answers,
            output_dir=str(folder),
            config_file=str(cookiecutter_config),
            overwrite_if_exists=overwrite_if_exists,
        )
        return Path(project)

    return run


@pytest.fixture(scope="session")
def project(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the default answers; shared, so nothing may be written into it."""
    return bake(tmp_path_factory.mktemp("bake"))
