"""The account of samples that could not be read and were passed over (`data.on_error: skip`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loguru import logger

from fasttrain.errors import UserError
from fasttrain.records import no_listener
from fasttrain.transfer import Bad

FEW = 10  # fewer bad samples never stop a training
SHARE = 0.1  # nor do they up to this part of an epoch


class Skips:
    """Counts the bad samples of each epoch and names each once.

    Args:
        kind: "training" or "validation".
        samples: of this rank in an epoch.
    """

    def __init__(self, kind: str, samples: int) -> None:
        self.kind, self.samples = kind, samples
        self.epoch, self.count = -1, 0
        self.event: Callable[..., None] = no_listener  # takes the events (records.Recorder.event)
        self._named: set[int] = set()

    def begin(self, epoch: int) -> None:
        """Count from 0."""
        self.epoch, self.count = epoch, 0

    def take(self, epoch: int, bad: Sequence[Bad], last: bool) -> None:
        """The bad samples of one batch; with the epoch's last batch their number is said.

        Raises:
            UserError: too many.
        """
        if epoch != self.epoch:
            self.begin(epoch)
        for number, text in bad:
            self.count += 1
            if number not in self._named:
                self._named.add(number)
                logger.warning(f"left out of the {self.kind}: {text}")
            self.event("skipped", kind=self.kind, file=text, index=number, epoch=epoch, count=self.count)
            if self.count >= FEW and self.count > SHARE * self.samples:
                raise UserError(
                    f"{self.count} of {self.samples} {self.kind} samples can't be read, the last one: {text}; "
                    f"more than {SHARE:.0%} is too much for data.on_error=skip: look at data.path"
                )
        if last and self.count:
            place = f"epoch {epoch + 1}: " if self.kind == "training" else ""
            what = "replaced by others" if self.kind == "training" else "left out"
            logger.warning(f"{place}{self.count} of {self.samples} {self.kind} samples can't be read and were {what}")
