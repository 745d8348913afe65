"""One optimizer step, from the loss to the new weights, with all that mixed precision and accumulation ask for."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fasttrain.finite import Finite
from fasttrain.precision import autocast
from fasttrain.state import State
from fasttrain.transfer import Batch


def build_optimizer(model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
    """SGD or AdamW by the section ``optimizer`` of the settings.

    fused: all parameters in one kernel, and a gradient scaler can skip a step without asking the host.
    Biases and norms (one dimension) get no weight decay.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optimizer.name == "adamw":
        return torch.optim.AdamW(groups, lr=optimizer.lr, betas=tuple(optimizer.betas), fused=True)
    nesterov = optimizer.momentum > 0
    sgd = torch.optim.SGD(groups, lr=optimizer.lr, momentum=optimizer.momentum, nesterov=nesterov, fused=True)
    if optimizer.momentum > 0:
        # Fused SGD leaves its momentum unset when the scaler skips the very first step, and computes with what happened
        # to lie in that memory in the next. Zeros give the same first step and bear a skipped one.
        for p in params:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


class Schedule:
    """Linear warm-up, then half a cosine (Loshchilov, Hutter: SGDR), as a function of the optimizer step.

    Args:
        lr: the highest rate.
        total: optimizer steps of the whole training.
        warmup: steps of the warm-up, at most a fifth of the training.
        final: where the cosine ends, as a part of lr.
    """

    def __init__(self, lr: float, total: int, warmup: int, final: float) -> None:
        self.lr, self.total, self.final = lr, total, final
        self.warmup = min(warmup, total // 5)

    def __call__(self, step: int) -> float:
        """The rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        part = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.lr * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * part)))


class Update:
    """Turns losses into optimizer steps.

    Args:
        model: as `parallel.wrap` gave it.
        dtype: of the forward pass; float16 gets a gradient scaler, None computes in float32.
        accumulate: batches for one step; an epoch's last step may have fewer.
        clip_norm: largest norm of the true gradient; None does not clip.
        on_nan: what follows from a loss or gradient that is not finite: stop or skip (finite.py).
        names: the file names of some samples, to tell them then.
        scaler: to use in place of torch's; for the tests.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        device: torch.device,
        *,
        dtype: torch.dtype | None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        on_nan: str = "stop",
        names: Callable[[list[int]], list[str]] | None = None,
        scaler: Any = None,
    ) -> None:
        self.model, self.optimizer, self.schedule, self.device = model, optimizer, schedule, device
        self.dtype, self.accumulate, self.clip_norm = dtype, accumulate, clip_norm
        self.scaler = scaler or torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self.scaled = dtype is torch.float16
        self.finite = Finite(model, optimizer, device, on_nan, self.scaled, names)
        self.step, self.lr = 1, schedule(0)  # number, from 1, and rate of the step that the current batch belongs to
        self.stepped = False  # whether the last batch ended a step; between, gradients are half gathered
        self._due, self._parts = True, 1
        self._epoch, self._ends = 0, False  # of the current batch: its epoch, whether it is the last one
        self._max_steps: int | None = None
        self._autocast = autocast(device, dtype)

    def forward(self, batch: Batch) -> AbstractContextManager[Any]:
        """The context of the forward pass: autocast; the ranks' gradients are summed only in a step's last batch."""
        first = batch.number - batch.number % self.accumulate
        last = min(first + self.accumulate - 1, batch.last)
        self._due, self._parts = batch.number == last, last - first + 1
        self._epoch, self._ends = batch.epoch, batch.number == batch.last
        self.finite.begin(batch, batch.number == first)
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = self._due  # what DDP's no_sync() sets; read by its forward pass
        return self._autocast

    def batches_left(self, state: State, max_steps: int | None) -> int | None:
        """Batches until the optimizer step at which to stop; None: no such step is set."""
        self._max_steps = max_steps
        return None if max_steps is None else (max_steps - state.step) * self.accumulate

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of this batch; the mean over the batches of the step."""
        self.finite.backward(self.scaler.scale(loss / self._parts if self._parts > 1 else loss), loss)

    def step_if_due(self, state: State) -> None:
        """After the last batch of a step: unscale, clip, set the rate, step, zero. `stepped` says whether it was one.

        Raises:
            UserError: the loss or the gradients are not finite, and ``train.on_nan`` does not bear it.
        """
        self.step, self.lr = state.step + 1, self.schedule(state.step)
        self.stepped = self._due
        if not self._due:
            return
        if self.clip_norm is not None or self.scaled:
            self.scaler.unscale_(self.optimizer)  # so that the norm is that of the true gradients
        bad = self.finite.check()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.finite.params, self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        if not bad:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        state.step += 1
        self.finite.note(state.step, self._epoch, self.lr, self._ends or state.step == self._max_steps)
