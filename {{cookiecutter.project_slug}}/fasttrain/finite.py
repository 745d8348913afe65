"""Steps whose loss or gradients are not finite: not taken, on any rank, and told (`train.on_nan`).

A NaN on one rank reaches the gradients of all in the sum over the ranks, so that each finds the same in the same step
without a message. On CUDA the finding stays on the device, where the optimizer heeds it; the host reads it some steps
later, the same number on every rank, so that all stop at the same step and none waits for the device.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import nn

from fasttrain.errors import UserError
from fasttrain.parallel import unwrap
from fasttrain.records import no_listener
from fasttrain.transfer import Batch

LAG = 8  # steps after which a finding is read; the device is never further behind than that
MOST_IN_A_ROW = 10  # steps; then something is broken for good
MOST_IN_A_ROW_SCALED = 20  # a gradient scaler may begin 16 halvings too high
FEW = 5  # samples that a line names


@dataclass
class _Step:
    """One optimizer step of this rank, until its finding is read."""

    number: int = 0
    epoch: int = 0
    lr: float = 0.0
    losses: list[torch.Tensor] = field(default_factory=list)  # one a batch
    indices: list[list[int]] = field(default_factory=list)  # of the samples, a list a batch
    found: torch.Tensor | None = None
    passed: Any = None  # event after which `found` may be read on the host


class Finite:
    """Finds what is not finite, keeps it out of the network, and decides by ``train.on_nan``.

    Costs a pass over the gradients, a copy of the floating-point buffers (batch-norm statistics) and two operations
    on single numbers a step.

    Args:
        model: as `parallel.wrap` gave it. Its floating-point buffers become parts of one tensor.
        optimizer: on CUDA a fused one skips the step by itself; for others the host has to wait for the finding.
        policy: stop or skip.
        scaled: there is a gradient scaler, for which infinite gradients are a part of its work.
        names: the file names of some samples.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        policy: str,
        scaled: bool,
        names: Callable[[list[int]], list[str]] | None = None,
    ) -> None:
        self.optimizer, self.policy, self.scaled, self.names = optimizer, policy, scaled, names
        heeds = getattr(optimizer, "_step_supports_amp_scaling", False)  # as torch's GradScaler asks
        self.on_device = device.type == "cuda" and heeds
        self.event: Callable[..., None] = no_listener  # takes the events (records.Recorder.event)
        self.count = self.in_a_row = 0
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self._flat = _flatten(unwrap(model).buffers())
        self._kept = [flat.clone() for flat in self._flat]
        self._groups = [[p for p in self.params if p.dtype is kind] for kind in {p.dtype for p in self.params}]
        self._on_cpu = device.type == "cpu"  # where reading a number waits for nothing
        self._found, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._step = _Step()
        self._unread: deque[_Step] = deque()

    def begin(self, batch: Batch, first: bool) -> None:
        """A forward pass is about to begin; first: of its step."""
        if first:
            for kept, flat in zip(self._kept, self._flat, strict=True):
                kept.copy_(flat)
            self._step = _Step()
        self._step.indices.append(batch.indices)

    def backward(self, loss: torch.Tensor, told: torch.Tensor) -> None:
        """The backward pass of a batch. A loss that is not finite makes all gradients NaN, whatever they are.

        told: the loss as the model gave it, before it was scaled and divided.
        """
        detached = loss.detach()
        self._step.losses.append(told.detach())
        if self._on_cpu and math.isfinite(detached.item()):
            loss.backward()
        else:  # beginning with 1, or with NaN
            loss.backward(detached.mul(0).add_(1))

    def check(self) -> bool:
        """Look at the gradients of a step, before it is taken. True: it must not be. On CUDA the optimizer knows."""
        self._found.zero_()
        for group in self._groups:
            gradients = [p.grad for p in group if p.grad is not None]
            if gradients:  # GradScaler's own kernel; a factor of 1 leaves every bit as it is
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        if self.on_device:
            self.optimizer.found_inf = self._found  # type: ignore[attr-defined]
            found = self._found.bool()
            for kept, flat in zip(self._kept, self._flat, strict=True):
                torch.where(found, kept, flat, out=flat)
            return False
        bad = bool(self._found)
        if bad:
            for kept, flat in zip(self._kept, self._flat, strict=True):
                flat.copy_(kept)
        return bad

    def note(self, number: int, epoch: int, lr: float, last: bool) -> None:
        """The step is over; read the finding of an earlier one, or if it is the last before a pause of all.

        Raises:
            UserError: on all ranks in the same step, if ``train.on_nan`` is stop, or too many in a row were skipped.
        """
        step = self._step
        step.number, step.epoch, step.lr = number, epoch, lr
        if self.on_device:
            step.found, step.passed = _to_host(self._found)
            self._unread.append(step)
            while self._unread and (last or len(self._unread) > LAG):
                self._read(self._unread.popleft())
        else:
            step.found = self._found
            self._read(step)

    def _read(self, step: _Step) -> None:
        if step.passed is not None:
            step.passed.synchronize()  # long past, unless the host is LAG steps ahead
        if not step.found:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        losses = [float(loss) for loss in step.losses]
        broken = [f"{loss:g}" for loss in losses if not math.isfinite(loss)]
        ranks = self._gather(broken[0] if broken else "", self._samples(step) if broken else "")
        if self.scaled and not any(loss for loss, _ in ranks) and self.in_a_row <= MOST_IN_A_ROW_SCALED:
            return  # the scaler's own search for a scale
        self.count += 1
        self.event("not_finite", step=step.number, epoch=step.epoch, lr=step.lr, losses=losses, samples=_joined(step))
        found = [f"the loss is {loss} on rank {rank}, {who}" for rank, (loss, who) in enumerate(ranks) if loss]
        what = "; ".join(found) or "the gradients are not finite, the losses are"
        text = f"epoch {step.epoch + 1}, step {step.number}, learning rate {step.lr:.3g}: {what}"
        if self.policy == "stop":
            raise UserError(
                f"{text}. The step was not taken. Look at the samples, lower optimizer.lr or set "
                "train.clip_norm; train.on_nan=skip leaves out such steps"
            )
        if self.in_a_row >= MOST_IN_A_ROW:
            raise UserError(
                f"{text}. That was the {self.in_a_row}th step in a row: the data or the weights are "
                "broken; lower optimizer.lr, or set train.clip_norm"
            )
        logger.warning(f"{text}. The step was left out, the {self.count}. so far (train.on_nan=skip)")

    def _gather(self, loss: str, samples: str) -> list[tuple[str, str]]:
        ranks: list[Any] = [(loss, samples)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks *= dist.get_world_size()
            dist.all_gather_object(ranks, (loss, samples))  # all ranks are here: they found the same
        return ranks

    def _samples(self, step: _Step) -> str:
        indices = _joined(step)
        some, more = indices[:FEW], len(indices) - FEW
        named = [] if self.names is None else self.names(some)
        text = ", ".join(map(str, some)) + (f" ({', '.join(named)})" if named else "")
        return f"samples {text}" + (f" and {more} more" if more > 0 else "")


def _joined(step: _Step) -> list[int]:
    return [index for indices in step.indices for index in indices]


def _to_host(found: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A copy on the host, and the event after which it is there. Waits for nothing."""
    copied = torch.empty((), pin_memory=True).copy_(found, non_blocking=True)
    passed = torch.cuda.Event(blocking=True)
    passed.record()
    return copied, passed


def _flatten(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Lay the floating-point buffers side by side in one tensor for each dtype, so that keeping them is one copy."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer.is_floating_point() and buffer.is_contiguous():
            groups.setdefault(buffer.dtype, []).append(buffer)
    flats = []
    for group in groups.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in group])
        begin = 0
        for buffer in group:
            buffer.data = flat[begin : begin + buffer.numel()].view_as(buffer)
            begin += buffer.numel()
        flats.append(flat)
    return flats
