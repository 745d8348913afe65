"""When checkpoints are written, and how a run goes on from one.

`last.pt` at the end of each epoch, within one by time or steps, and when a signal asks for the end; `best.pt` when the
validation metric improves. A save is a copy into host memory: another process writes it (writer.py). One that fails
costs itself, not the training: the file before stays, every rank's log says it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import nn

from fasttrain import checkpoint, resume
from fasttrain.checkpoint import BEST, FORMAT, LAST, PREVIOUS
from fasttrain.errors import UserError
from fasttrain.parallel import unwrap
from fasttrain.run import Run
from fasttrain.snapshot import is_finite
from fasttrain.state import State, is_better
from fasttrain.update import Update
from fasttrain.watch import Watch
from fasttrain.writer import Answers, Writer

PATIENCE = 20.0  # seconds that a save under way gets when the training fails


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
        self.directory, self.writes, self.state, self.stop = run.dir, run.is_main, state, run.stop
        self.model, self.optimizer, self.scaler = model, update.optimizer, update.scaler
        self.update, self.facts, self.settings = update, dict(facts), settings
        self._last_saved = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._saved: dict[str, Any] | None = None  # the state that last.pt holds, or will
        self._finite = {name for name, buffer in self._buffers() if is_finite(buffer)}
        self._watch: Watch | None = None
        self._prepared = False
        self.writer: Writer | None = None
        if self.writes:
            self.writer = Writer(run.dir, update.device)
            run.stack.callback(self.writer.close, PATIENCE)
        self.stop.save, self.stop.seconds = self._save_to_stop, settings.stop_seconds
        if run.resume is not None:
            path = run.resume
            found = Path(run.on_rank0(lambda: str(checkpoint.intact(path))))
            self.resume(found)
            if found == run.dir / LAST:  # a training that was done already leaves it as it is
                self._saved = self.state.to_dict()
        state.run_id = state.run_id or run.id
        self._last_step = state.step
        # The metric of what is in best.pt, and whether a better one could not be saved, or not here. The file is asked,
        # not the state: a kill between the writing of best.pt and of last.pt leaves a best.pt of a later epoch.
        self._best_held = resume.best_held(run.dir / BEST, settings.metric, self.facts) if self.writes else None
        self._best_lost = state.best is not None and is_better(state.best, self._best_held, settings.mode)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint whose checksums were compared; see resume.py."""
        resume.restore(path, self.state, self.model, self.update, self.facts)

    # ---- in the loop -------------------------------------------------------------------------------------------------

    def save_last_if_due(self, watch: Watch) -> None:
        """After a batch, if it ended a step: write last.pt if that one is old enough; end here if a signal asked to."""
        if not self.update.stepped:
            return
        self._watch = watch
        if self.writer is not None and not self.writer.busy and self._due():
            self._save((LAST,), {}, watch)
        elif self.writer is not None and not self._prepared:
            self._prepare(self.writer)
        self.stop.check()

    def save_epoch(self, watch: Watch, metrics: Mapping[str, float], improved: bool) -> None:
        """After validation: best.pt if the metric improved, last.pt always. End here if a signal asked to."""
        self._watch, self._metrics = watch, dict(metrics)
        if self.writer is not None:
            if self._belongs_in_best(metrics, improved):
                self._save((BEST, LAST), metrics, watch)
            elif not self.writer.busy:
                self._save((LAST,), metrics, watch)
            else:  # epochs shorter than a save: not to hold them up, after the first step that finds it done
                self._last_saved = float("-inf")
        self.stop.check()

    def finish(self, watch: Watch) -> None:
        """After the last epoch: wait until the files are whole.

        Raises:
            UserError: nothing could be saved in the whole run.
        """
        self.stop.over()
        if self.writer is None:
            return
        self._save_where_it_stands(watch)
        if not os.path.exists(self.directory / LAST):
            raise UserError(f"{self.directory}: no checkpoint could be saved; the warnings above say why")

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        steps = self.settings.every_steps
        if steps is not None and self.state.step - self._last_step >= steps:
            return True
        seconds: float = self.settings.every_minutes * 60
        return time.monotonic() - self._last_saved >= seconds

    def _prepare(self, writer: Writer) -> None:
        """After the first step, when the optimizer has all of its state: memory and process, in the background."""
        self._prepared = True
        needed = 3 * writer.prepare(self._content({}))
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            self._warn(f"{self.directory}: its free space can't be read ({error.strerror}): saves may fail")
            return
        if free < needed:
            self._warn(
                f"{self.directory}: {free / 1e6:,.1f} MB are free, but {BEST}, {LAST} and the one being written take "
                f"{needed / 1e6:,.1f} MB: saves may fail"
            )

    def _save(self, names: tuple[str, ...], metrics: Mapping[str, float], watch: Watch) -> None:
        """Start writing; the clock of the loop stops for the snapshot."""
        assert self.writer is not None
        files = [(name, PREVIOUS if name == LAST else None) for name in names]
        self._prepared = True
        self._last_saved, self._last_step, self._saved = time.monotonic(), self.state.step, self.state.to_dict()
        best = metrics.get(self.settings.metric)
        began = time.perf_counter()
        pause: list[float] = []

        def done(answers: Answers) -> None:
            stall = pause[0] if pause else time.perf_counter() - began
            for name, answer in answers.items():
                self._note(name, answer, watch, saved["step"], stall)
            if BEST in answers:
                self._best_lost = "error" in answers[BEST]
                self._best_held = self._best_held if self._best_lost else best

        saved = self._saved
        with watch.pause("checkpoint"):
            # A buffer that began with infinity, a causal mask say, may hold it; no NaN, and nothing else.
            infinite = {name for name, _ in self._buffers()} - self._finite
            self.writer.save(self._content(metrics), files, done, infinite)
            pause.append(time.perf_counter() - began)

    def _note(self, name: str, answer: Mapping[str, Any], watch: Watch, step: int, stall: float) -> None:
        """In the records and, if it failed, in every rank's log."""
        if "error" not in answer:
            watch.sink.event("checkpoint", file=name, step=step, pause=stall, **answer)
            return
        watch.sink.event("checkpoint_failed", file=name, step=step, pause=stall, **answer)
        stands = "the one before is unharmed" if os.path.exists(self.directory / name) else "there is none yet"
        if name == LAST:
            self._saved = None
        self._warn(
            f"{self.directory / name}: not saved at step {step} ({answer['error']}); {stands}, the training goes on"
        )

    def _warn(self, text: str) -> None:
        logger.warning(text)
        self.stop.tell(text)

    def _belongs_in_best(self, metrics: Mapping[str, float], improved: bool) -> bool:
        """Whether it is the best and no worse than what best.pt holds, or, if the best could not be saved, better."""
        metric, held, mode = metrics[self.settings.metric], self._best_held, self.settings.mode
        if improved and held is not None and is_better(held, metric, mode):
            logger.info(f"{self.directory / BEST} holds a better one ({held:g}) from before, and stays")
            return False
        if improved:
            return True
        return self._best_lost and self.writer is not None and not self.writer.busy and is_better(metric, held, mode)

    def _save_where_it_stands(self, watch: Watch) -> None:
        """last.pt as of now, whole on the disk when this returns, if the disk takes it."""
        assert self.writer is not None
        self.writer.wait()
        if self._saved != self.state.to_dict():
            self._save((LAST,), self._metrics if self.state.position == 0 else {}, watch)
            self.writer.wait()

    def _save_to_stop(self) -> None:
        if self._watch is not None:  # else no step was done since the start, and last.pt is as it was
            self._save_where_it_stands(self._watch)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in unwrap(self.model).named_buffers(remove_duplicate=False):
            yield _clean(name), buffer

    def _content(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": {_clean(name): value for name, value in unwrap(self.model).state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "state": self.state.to_dict(),
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
            "facts": self.facts,
        }


def _clean(name: str) -> str:
    """Without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")
