"""Going on from a checkpoint: what fits is restored, what was changed since is named, or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loguru import logger
from torch import nn

from fasttrain import checkpoint
from fasttrain.checkpoint import FORMAT
from fasttrain.errors import UserError, as_typed, one_line
from fasttrain.parallel import unwrap
from fasttrain.state import State
from fasttrain.update import Update

# What comes of a dictionary in which other things stand than expected.
ODD = (RuntimeError, ValueError, KeyError, TypeError, AttributeError)


def restore(path: Path, state: State, model: nn.Module, update: Update, facts: Mapping[str, Any]) -> None:
    """Restore model, optimizer, scaler and state from a checkpoint.

    Args:
        facts: of this run: classes, sizes, settings; compared with those of the checkpoint.

    Raises:
        UserError: if it was made with other classes or another amount of data, stands within an epoch whose order would
            now be another, or does not fit the model.
    """
    content = checkpoint.read(path)
    parts = ("model", "optimizer", "scaler", "state", "facts")
    if content.get("format") != FORMAT or not all(isinstance(content.get(part), dict) for part in parts):
        raise UserError(
            f"resume={path}: not a checkpoint of this project (to start from its weights: model.weights=...)"
        )
    plain = unwrap(model)
    groups = update.optimizer.state_dict()["param_groups"]  # rates and decays are those of the settings now
    try:
        _compare(path, content, facts)
        if not all(isinstance(each, dict) for each in content["optimizer"]["state"].values()):
            raise ValueError("the optimizer's state is damaged")
        plain.load_state_dict(checkpoint.clean_keys(content["model"], plain.state_dict()))
        update.optimizer.load_state_dict({"state": content["optimizer"]["state"], "param_groups": groups})
        if content["scaler"]:  # empty unless the run so far was in float16
            update.scaler.load_state_dict(content["scaler"])
        state.restore(content["state"])
        if state.position > facts["training_samples"]:
            raise ValueError(f"state.position is {state.position} of {facts['training_samples']} training samples")
        for group in update.optimizer.param_groups if state.step else ():
            group["lr"] = update.schedule(state.step - 1)  # as the last step left it, should no other one come
        if (reason := _other_measure(content["facts"], facts)) is not None and state.best is not None:
            logger.warning("{}: the best so far, {}, no longer counts ({})", path, state.best, reason)
            state.best = state.best_epoch = None
            state.epochs_without_gain = 0
    except ODD as error:
        reason = as_typed(one_line(error))
        raise UserError(f"resume={path}: it does not fit this model or optimizer: {reason}") from None
    logger.info(
        "resumed from {}: epoch {}, position {}, step {}, best {}",
        path,
        state.epoch,
        state.position,
        state.step,
        state.best,
    )


def best_held(path: Path, metric: str, facts: Mapping[str, Any]) -> float | None:
    """The metric of the model that stands in best.pt, so that no worse one takes its place.

    None if it can't be compared: there is none, it is damaged, or was measured on other data.
    """
    if not os.path.exists(path):
        return None
    try:
        content = checkpoint.load(path)
        value = content["metrics"].get(metric) if _other_data(content["facts"], facts) is None else None
        return None if value is None else float(value)
    except UserError as error:
        logger.warning(f"{error}; the next best takes its place")
    except ODD as error:
        logger.warning(
            f"{path}: not a checkpoint of this project ({type(error).__name__}); the next best takes its place"
        )
    return None


def fingerprint(dataset: Any) -> str | None:
    """What a data set says of its samples by a method of that name; None if it has none, and nothing is compared."""
    own = getattr(dataset, "fingerprint", None)
    return None if own is None else str(own())


def _other_measure(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """Why metrics from before can't be compared with those to come; None: they can."""
    return _changed(saved, facts, "checkpoint.metric", "checkpoint.mode") or _other_data(saved, facts)


def _other_data(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    before, now = saved.get("training_data"), facts.get("training_data")
    if before is not None and now is not None:  # another split leaves other training files, too
        return None if before == now else "other data, or split otherwise"
    return _changed(saved, facts, "seed", "data.path", "data.val_fraction")


def _changed(saved: Mapping[str, Any], facts: Mapping[str, Any], *names: str) -> str | None:
    """The first of these settings that differs, "seed 0 -> 1"."""
    for change in _differences(saved.get("settings", {}), facts["settings"]):
        if change.split(" ", 1)[0] in names:
            return change
    return None


def _compare(path: Path, content: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuse a checkpoint made with other data or another optimizer; name the settings that have changed."""
    saved = content["facts"]
    for fact in ("classes", "training_samples", "optimizer"):
        if saved.get(fact) != facts[fact]:
            raise UserError(f"resume={path}: it was made with {fact} {saved.get(fact)}, now it is {facts[fact]}")
    if content["state"].get("position") and saved.get("effective_batch") != facts["effective_batch"]:
        before, now = saved.get("effective_batch"), facts["effective_batch"]
        raise UserError(
            f"resume={path}: it stands within an epoch of effective batches of {before}, now they are {now}: "
            "batch_size x processes x accumulate must stay the same"
        )
    # The position counts samples in an order that follows from these.
    if content["state"].get("position") and (change := _changed(saved, facts, "seed", "data.shuffle")) is not None:
        raise UserError(
            f"resume={path}: it stands within an epoch, and {change} changes the order of its samples: some would come "
            "twice and others not at all. Set it back, or start from its weights with model.weights=..."
        )
    before, now = saved.get("training_data"), facts.get("training_data")
    if before is not None and now is not None and before != now:
        if content["state"].get("position"):
            raise UserError(
                f"resume={path}: it stands within an epoch of other training files (as many, but with other names or "
                "labels): the rest of the epoch would be other samples. model.weights=... starts from its weights"
            )
        logger.warning("{}: other training files than at the checkpoint: as many, but other names or labels", path)
    changed = list(_differences(saved.get("settings", {}), facts["settings"]))
    if changed:
        logger.warning("settings changed since the checkpoint: {}", "; ".join(changed))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What was changed between two settings, "optimizer.lr 0.1 -> 0.2" each; where the run lies does not count."""
    for name in sorted({*before, *now} - ({"run", "resume"} if not prefix else set()), key=str):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield as_typed(f"{prefix}{name} {old} -> {new}", 300)
