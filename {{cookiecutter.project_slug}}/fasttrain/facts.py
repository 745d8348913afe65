"""What a run was made with: versions, git revision, command line, in ``run.json`` of the run directory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from fasttrain import __version__

FILE = "run.json"
PACKAGES = ("torch", "torchvision", "numpy", "omegaconf", "opencv-python-headless", "simplejpeg", "pillow")


def write(path: Path, run_id: str, home: Path, device: torch.device, world: int, started: float, began: float) -> None:
    """Write the file, or none where the disk is full. A resumed run keeps what stands there and adds this start.

    Args:
        run_id: stands in the run's checkpoints, too.
        home: the project's folder, for its revision.
        started, began: when the run and when this process began, ``time.time()``.
    """
    facts = {
        "id": run_id,
        "started": started,
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {"fasttrain": __version__, **{name: _version(name) for name in PACKAGES}},
        "git": _revision(home),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "world_size": world,
    }
    if (first := _read(path)) is not None:
        before = first.get("resumed")
        facts = {**first, "resumed": [*(before if isinstance(before, list) else []), {**facts, "started": began}]}
    put(path, json.dumps(facts, indent=2) + "\n")


def put(path: Path, text: str) -> None:
    """Write a file of the run directory whole, down to the disk; that it can't be written is said and costs no more."""
    whole = path.with_name(f".{path.name}.tmp")
    try:
        with whole.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the renaming: after a power cut there would be an empty file
        whole.replace(path)
    except OSError as error:
        logger.warning(f"{path}: can't be written ({error.strerror or error})")


def first_start(path: Path) -> tuple[float, str] | None:
    """When the run first began, and its id; None if the file can't be read, which is said."""
    if (facts := _read(path)) is None:
        logger.warning(f"{path}: not readable: when the run began is not known any more, and taken to be now")
        return None
    return float(facts["started"]), str(facts.get("id", ""))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        float(facts["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(facts)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # another build of the same module, opencv-python say
        return None


def _revision(home: Path) -> str | None:
    """The project's git revision, with "+changes" if files differ from it; None outside git."""
    git = ["git", "-C", str(home)]
    try:
        # A repository around the project that doesn't hold it says nothing about it.
        subprocess.run([*git, "ls-files", "--error-unmatch", "train.py"], capture_output=True, timeout=10, check=True)
        describe = [*git, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
