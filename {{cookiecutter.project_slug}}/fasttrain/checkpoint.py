"""What a checkpoint file is: a ZIP archive of plain data with checksums, whole, clean names, nothing executed.

`best.pt` is written only when the validation metric improves, `last.pt` to go on from (keeper.py says when, saver.py
how). A file is written beside its place and renamed, so that at any moment the old or the new one is there, whole; the
`last.pt` before is kept as `last.previous.pt`. It holds tensors, numbers and texts only and loads with
``torch.load(weights_only=True)``, which executes nothing.
"""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn

from fasttrain.errors import UserError, as_typed, one_line
from fasttrain.parallel import unwrap

FORMAT = 1
BEST, LAST, PREVIOUS = "best.pt", "last.pt", "last.previous.pt"


def intact(path: Path) -> Path:
    """The checkpoint, or if it is a damaged ``last.pt`` the one before it, which is said.

    Raises:
        UserError: it is damaged, and there is none before it that isn't.
    """
    try:
        verify(path)
    except UserError as error:
        previous = path.with_name(PREVIOUS)
        if path.name != LAST or not previous.exists():
            raise
        verify(previous)
        logger.warning(f"{error}; going on from the one before it, {previous}")
        return previous
    return path


def verify(path: Path) -> None:
    """Compare the checksum (CRC-32) of each part of the file. Reads it once.

    Raises:
        UserError: the file is damaged or can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if packed or sum(entry.file_size for entry in entries) > os.path.getsize(path):
                raise UserError(f"{path}: not a checkpoint: its parts are packed, or overlap")
            damaged = archive.testzip()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError, EOFError, struct.error) as error:
        raise _unreadable(path, error) from None
    if damaged is not None:
        raise UserError(f"{path}: damaged: the checksum of its part {damaged} does not match")


def _unreadable(path: str | Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(f"{path}: not a readable checkpoint, cut off or damaged ({reason[:200]})")


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint into host memory. Executes nothing that is in it.

    Raises:
        UserError: naming the file, if it is damaged, can't be read or is no checkpoint.
    """
    if zipfile.is_zipfile(path):  # files of weights may be of an older kind, without checksums
        verify(Path(path))
    return read(path)


def read(path: str | Path) -> dict[str, Any]:
    """The same without comparing checksums, for a file that was verified."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except pickle.UnpicklingError:
        text = "not loaded: it is damaged, or holds other things than tensors, numbers and texts"
        raise UserError(f"{path}: {text}") from None
    except Exception as error:  # what is in a damaged or hostile file makes PyTorch's reader raise almost anything
        raise _unreadable(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a checkpoint: holds a {type(content).__name__}, expected a dictionary")
    return content


def clean_keys(weights: Mapping[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """The names as the plain model has them: without the prefixes of DistributedDataParallel and torch.compile.

    Names that are as expected stay: a model may have a part of its own that is called ``module``.
    """
    if set(weights) == set(expected):
        return dict(weights)
    cleaned = {}
    for name, value in weights.items():
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        while parts and parts[0] == "module":
            parts = parts[1:]
        cleaned[".".join(parts)] = value
    return cleaned


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Start the model from a checkpoint of this project, or from a plain file of weights.

    Every name must match. Only the last layer may have another shape (another number of classes): it keeps its fresh
    weights.
    """
    content = load(path)
    own, found = unwrap(model).state_dict(), content.get("model", content)
    plain = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not plain or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(f"model.weights={path}: holds no weights by name")
    weights = clean_keys(found, own)
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        kind, names = ("lacks", missing) if missing else ("has the unknown", unknown)
        raise UserError(
            f"model.weights={path}: the checkpoint {kind} {names[0]} ({len(names)} in all): another model.name?"
        )
    other = [name for name, value in weights.items() if getattr(value, "shape", None) != own[name].shape]
    last = {name.rpartition(".")[0] for name in [*own][-2:]}
    for name in other:
        if name.rpartition(".")[0] not in last:
            shapes = f"{tuple(weights[name].shape)}, the model has {tuple(own[name].shape)}"
            raise UserError(f"model.weights={path}: {name} has shape {shapes}")
        weights[name] = own[name]
    if other:
        logger.warning("{}: {} have another shape (classes?) and start fresh", path, ", ".join(other))
    try:
        unwrap(model).load_state_dict(weights)
    except (RuntimeError, TypeError, ValueError) as error:  # tensors without data, or in a form that can't be copied
        reason = as_typed(one_line(error))
        raise UserError(f"model.weights={path}: can't be used: {reason}") from None
