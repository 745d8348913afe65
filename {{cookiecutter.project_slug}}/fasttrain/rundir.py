"""The run directory: made or taken over, held against a second training, and what in it is gone on from."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from fasttrain import checkpoint, facts, lock
from fasttrain.checkpoint import LAST, PREVIOUS
from fasttrain.errors import SettingsError, UserError
from fasttrain.stop import MARKER


def claim(
    directory: str | None, resume: str | None, began: float, home: Path, stack: ExitStack
) -> tuple[str, str | None, float, str, str]:
    """Make or take over the run directory, and hold it until the stack is closed.

    Returns its path, the checkpoint to resume from, when the run first began, its id, and a token of this start.
    """
    if directory is None:
        path = _new_directory(home / "runs")
    else:
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError("run.dir", directory, f"a folder that can be made ({error.strerror})") from None
    first = path / facts.FILE
    _refuse_second(first, resume)
    stack.enter_context(lock.held(path))
    _refuse_second(first, resume)  # one that ended meanwhile
    found = [str(path / name) for name in (LAST, PREVIOUS) if (path / name).exists()]
    saved = resume if resume != "auto" else found[0] if found else None
    if saved is not None and Path(saved).is_dir():
        expected = f"a checkpoint; this is a folder, try resume={Path(saved) / LAST}"
        raise SettingsError("resume", saved, expected)
    try:
        (path / MARKER).unlink(missing_ok=True)  # it goes on
    except OSError as error:
        raise SettingsError("run.dir", directory, f"a folder that can be written ({error.strerror})") from None
    token = uuid.uuid4().hex
    started, name = began, token
    if first.exists():  # the same run, even if it was ended before its first checkpoint
        started, name = facts.first_start(first) or (began, _id_in(saved) or token)
    return str(path), saved, started, name, token


def _refuse_second(first: Path, resume: str | None) -> None:
    if first.exists() and resume is None:
        expected = "a new folder: this one holds a run already. resume=auto goes on with it"
        raise SettingsError("run.dir", first.parent, expected)


def _id_in(path: str | None) -> str | None:
    state = {} if path is None else checkpoint.read(checkpoint.intact(Path(path))).get("state")
    return str(state["run_id"]) if isinstance(state, dict) and state.get("run_id") else None


def _new_directory(runs: Path) -> Path:
    name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1000):
        path = runs / (f"{name}_{number}" if number else name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{path}: the run directory can't be made ({error.strerror}): set run.dir") from None
        return path
    raise UserError(f"{runs}: no free name for a run directory: set run.dir")
