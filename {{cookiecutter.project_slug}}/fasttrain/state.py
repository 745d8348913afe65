"""Where a training stands: all that its loop counts, in one place, and exactly this is saved and restored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fasttrain.transfer import Batch

_KINDS: dict[type, Any] = {int: int, str: str}  # of a number; of all others: a number or None


@dataclass
class State:
    """The loop's numbers. Positions, not histories: random draws follow from them, so no generator's state is saved.

    (seeding.py; the model, the optimizer and the gradient scaler have their own states, which are saved beside this.)
    """

    epoch: int = 0  # number of the epoch that runs or comes next, from 0: as many are finished
    position: int = 0  # samples of this epoch's global order that are done, over all ranks
    step: int = 0  # optimizer steps done
    best: float | None = None  # best validation metric so far
    best_epoch: int | None = None
    epochs_without_gain: int = 0  # for early stopping
    run_id: str = ""  # of the run that began it, in run.json too; whoever resumes it keeps it

    def remaining_epochs(self, epochs: int, max_steps: int | None, early_stop: int | None) -> Iterator[int]:
        """The epochs to run, the one that was left in the middle first.

        Args:
            epochs, max_steps: the length of the training.
            early_stop: stop after so many complete epochs without a better metric.
        """
        while self.epoch < epochs and (max_steps is None or self.step < max_steps) and not self.gave_up(early_stop):
            yield self.epoch

    def gave_up(self, early_stop: int | None) -> bool:
        """Whether there were ``early_stop`` epochs in a row without a better metric."""
        return early_stop is not None and self.epochs_without_gain >= early_stop

    def advance(self, batch: Batch) -> None:
        """This batch is done."""
        self.position = batch.end

    def finish_epoch(self, metrics: Mapping[str, float], name: str, mode: str, complete: bool) -> bool:
        """Take in the validation metrics, the same on all ranks; True if the deciding one is the best so far.

        If any of them is NaN or infinite, the network is broken and none is a best.

        Args:
            name: of the metric that decides.
            mode: "max" or "min", the better direction.
            complete: False if max_steps ended the epoch in the middle; it can then be gone on with.
        """
        metric = metrics[name] if all(map(math.isfinite, metrics.values())) else math.nan
        improved = is_better(metric, self.best, mode)
        if improved:
            self.best, self.best_epoch = metric, self.epoch
        if complete:
            self.epoch, self.position = self.epoch + 1, 0
            self.epochs_without_gain = 0 if improved else self.epochs_without_gain + 1
        return improved

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over the numbers of a checkpoint; one that it lacks keeps its first value.

        Raises:
            ValueError: one of them is of another kind, or counts less than 0.
        """
        for field in fields(self):
            if field.name in saved:
                value = saved[field.name]
                kinds = _KINDS.get(type(field.default), (int, float, type(None)))
                if not isinstance(value, kinds) or (kinds is int and value < 0):
                    raise ValueError(f"state.{field.name} is {value!r}")
                setattr(self, field.name, value)


def is_better(metric: float, best: float | None, mode: str) -> bool:
    """Whether a metric beats the best so far. NaN and infinity never do, and anything finite beats them."""
    if not math.isfinite(metric):
        return False
    if best is None or not math.isfinite(best):
        return True
    return metric > best if mode == "max" else metric < best
