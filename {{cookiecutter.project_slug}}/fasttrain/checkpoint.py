"""Checkpoints: whole files of plain data.

`best.pt` is written only when the validation metric improves, `last.pt` at the end of each epoch and every so many
minutes, to go on from. A file is written beside its place and renamed, so that at any moment the old or the new one
is there, whole. It holds tensors, numbers and texts only and loads with ``torch.load(weights_only=True)``, which
executes nothing.
"""

from __future__ import annotations

import math
import os
import pickle
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn

from fasttrain.errors import UserError
from fasttrain.finite import first_broken
from fasttrain.parallel import unwrap
from fasttrain.run import Run
from fasttrain.state import State
from fasttrain.update import Update
from fasttrain.watch import Watch

FORMAT = 1


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file whole or not at all: to a temporary name, to the disk, then renamed.

    Raises:
        UserError: the disk is full or can't be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed process left is overwritten
    try:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch says a full disk by a RuntimeError of its own, after the OSError
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"{path}: can't be saved ({cause.strerror}); what stood there before is unharmed") from error
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself reaches the disk with the folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint into host memory. Executes nothing that is in it.

    Raises:
        UserError: naming the file, if it can't be read or is no checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such checkpoint") from None
    except pickle.UnpicklingError:
        text = "not loaded: it is damaged, or holds other things than tensors, numbers and texts"
        raise UserError(f"{path}: {text}") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: not a readable checkpoint, cut off or damaged ({reason[:200]})") from None
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
    if not isinstance(found, dict):
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
    unwrap(model).load_state_dict(weights)


class Keeper:
    """Writes the checkpoints of a run and goes on from them.

    Args:
        run: says where, whether this rank writes (rank 0 does), and what to go on from.
        facts: plain data that belongs to the model: classes, settings, sizes. Saved with it, compared on resuming.
        settings: the section ``checkpoint``.
    """

    def __init__(
        self, run: Run, state: State, model: nn.Module, update: Update, facts: Mapping[str, Any], settings: Any
    ) -> None:
        self.directory, self.writes, self.state = run.dir, run.is_main, state
        self.model, self.optimizer, self.scaler = model, update.optimizer, update.scaler
        self.update, self.every, self.facts = update, settings.every_minutes * 60, dict(facts)
        self._last_saved = time.monotonic()
        if run.resume is not None:
            self.resume(run.resume)

    def resume(self, path: Path) -> None:
        """Restore model, optimizer, scaler and state from a checkpoint.

        Raises:
            UserError: if it was made with other classes or another amount of data, or does not fit the model.
        """
        content = load(path)
        parts = ("model", "optimizer", "scaler", "state", "facts")
        if content.get("format") != FORMAT or not all(isinstance(content.get(part), dict) for part in parts):
            raise UserError(
                f"resume={path}: not a checkpoint of this project (to start from its weights: model.weights=...)"
            )
        self._compare(path, content)
        plain = unwrap(self.model)
        groups = self.optimizer.state_dict()["param_groups"]  # rates and decays are those of the settings now
        try:
            if not all(isinstance(each, dict) for each in content["optimizer"]["state"].values()):
                raise ValueError("the optimizer's state is damaged")
            plain.load_state_dict(clean_keys(content["model"], plain.state_dict()))
            self.optimizer.load_state_dict({"state": content["optimizer"]["state"], "param_groups": groups})
            self.scaler.load_state_dict(content["scaler"])
            self.state.restore(content["state"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"resume={path}: it does not fit this model or optimizer: {reason}") from None
        logger.info(
            "resumed from {}: epoch {}, position {}, step {}, best {}",
            path,
            self.state.epoch,
            self.state.position,
            self.state.step,
            self.state.best,
        )

    def _compare(self, path: Path, content: Mapping[str, Any]) -> None:
        """Refuse a checkpoint made with other data or another optimizer; name the settings that have changed."""
        saved = content["facts"]
        for fact in ("classes", "training_samples", "optimizer"):
            if saved.get(fact) != self.facts[fact]:
                raise UserError(
                    f"resume={path}: it was made with {fact} {saved.get(fact)}, now it is {self.facts[fact]}"
                )
        if content["state"].get("position") and saved.get("effective_batch") != self.facts["effective_batch"]:
            before, now = saved.get("effective_batch"), self.facts["effective_batch"]
            raise UserError(
                f"resume={path}: it stands within an epoch of effective batches of {before}, now they are {now}: "
                "batch_size x processes x accumulate must stay the same"
            )
        changed = list(_differences(saved.get("settings", {}), self.facts["settings"]))
        if changed:
            logger.warning("settings changed since the checkpoint: {}", "; ".join(changed))

    def save_last_if_due(self, watch: Watch) -> None:
        """After a batch: write last.pt if it ended a step and the last one is old enough. The clock stops meanwhile."""
        if self.writes and self.update.stepped and time.monotonic() - self._last_saved >= self.every:
            with watch.pause("checkpoint"):
                self._write("last.pt", {}, watch)

    def save_epoch(self, watch: Watch, metrics: Mapping[str, float], improved: bool) -> None:
        """After validation: best.pt if the metric improved, last.pt always."""
        if not self.writes:
            return
        with watch.pause("checkpoint"):
            if improved:
                self._write("best.pt", metrics, watch)
            self._write("last.pt", metrics, watch)

    def _write(self, name: str, metrics: Mapping[str, float], watch: Watch) -> None:
        began = time.perf_counter()
        model = {k.replace("_orig_mod.", ""): v for k, v in unwrap(self.model).state_dict().items()}
        if (broken := first_broken(model.items())) is not None:
            logger.warning(f"{name} is not written: {broken} is not finite; what stood there before is unharmed")
            return
        save(
            self.directory / name,
            {
                "format": FORMAT,
                "model": model,
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "state": self.state.to_dict(),
                "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
                "facts": self.facts,
            },
        )
        self._last_saved = time.monotonic()
        watch.sink.event("checkpoint", file=name, step=self.state.step, seconds=time.perf_counter() - began)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What was changed between two settings, "optimizer.lr 0.1 -> 0.2" each; where the run lies does not count."""
    for name in sorted({*before, *now} - ({"run", "resume"} if not prefix else set())):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} {old} -> {new}"
