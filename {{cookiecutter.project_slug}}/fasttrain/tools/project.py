"""The only way from the tools to the owner's files: data.py, model.py, config.py and train.py of the project."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2]


def module(name: str) -> Any:
    """One of the owner's modules, from the project's folder wherever the command was started."""
    if str(HOME) not in sys.path:
        sys.path.insert(0, str(HOME))
    return importlib.import_module(name)
