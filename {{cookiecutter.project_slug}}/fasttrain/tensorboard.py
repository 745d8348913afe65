"""TensorBoard files of a run, written by the recorder's thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttrain.errors import SettingsError
from fasttrain.records import PHASES, BatchRecord


class TensorBoardView:
    """A view that writes one point for each look of the recorder (a quarter of a second), the mean of its batches.

    Args:
        directory: where the event files go.
        world: number of ranks; a rank's images per second are multiplied by it.

    Raises:
        SettingsError: the tensorboard package is missing.
    """

    def __init__(self, directory: Path, world: int = 1) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            missing = "the tensorboard package: pip install tensorboard"
            raise SettingsError("dashboard.tensorboard", True, missing) from error
        self._writer: Any = SummaryWriter(str(directory))
        self._world = world
        self._step = 0

    def batches(self, records: list[BatchRecord]) -> None:
        self._step = records[-1].step
        wall = sum(record.wall for record in records)
        for name in PHASES:
            self._add(f"milliseconds/{name}", sum(getattr(record, name) for record in records) / len(records) * 1e3)
        if wall > 0:
            self._add("speed/images_per_second", sum(record.images for record in records) * self._world / wall)
        losses = [record.loss for record in records if record.loss is not None]
        if losses:
            self._add("train/loss", sum(losses) / len(losses))
        if records[-1].lr is not None:
            self._add("train/lr", records[-1].lr)

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "validation":
            for name, value in event.items():
                if isinstance(value, float) and name != "time":
                    self._add(f"validation/{name}", value)

    def draw(self, now: float) -> None:
        """Nothing to do: the writer flushes by itself."""

    def close(self) -> None:
        self._writer.close()

    def _add(self, name: str, value: float) -> None:
        self._writer.add_scalar(name, value, self._step)
