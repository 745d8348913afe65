"""What a run was made with: versions, git revision, command line, in ``run.json`` of the run directory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fasttrain import __version__
from fasttrain.errors import UserError

FILE = "run.json"
PACKAGES = ("torch", "torchvision", "numpy", "omegaconf", "opencv-python-headless", "simplejpeg", "pillow")


def write(path: Path, run_id: str, home: Path, device: torch.device, world: int, started: float, began: float) -> None:
    """Write the file. A resumed run keeps what stands there about the first start, and adds this one.

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
    if path.exists():
        first = _read(path)
        facts = {**first, "resumed": [*first.get("resumed", []), {**facts, "started": began}]}
    whole = path.with_suffix(".tmp")
    whole.write_text(json.dumps(facts, indent=2) + "\n")
    whole.replace(path)


def first_start(path: Path) -> tuple[float, str]:
    """When the run first began, and its id."""
    facts = _read(path)
    return float(facts["started"]), str(facts.get("id", ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
        float(facts["started"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}): choose another run.dir") from None
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
