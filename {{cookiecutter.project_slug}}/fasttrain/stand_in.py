"""A model that takes a set time and no CPU, as a GPU would: it shows what the loader can feed, on any machine."""

from __future__ import annotations

import time

import torch
from torch import nn


class StandIn(nn.Module):
    """Predicts from the mean colour of some of the pixels, after ``milliseconds``.

    Args:
        classes: number of outputs.
        milliseconds: that a forward pass takes.
        holds_interpreter: keep Python busy meanwhile, as a loop does that launches many tiny kernels; else sleep.

    Shapes: (N, 3, H, W) -> (N, classes).
    """

    def __init__(self, classes: int, milliseconds: float, holds_interpreter: bool) -> None:
        super().__init__()
        self.seconds, self.holds_interpreter = milliseconds / 1e3, holds_interpreter
        self.head = nn.Linear(3, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self.seconds
        logits: torch.Tensor = self.head(images[:, :, ::8, ::8].mean(dim=(2, 3)))
        while self.holds_interpreter and time.perf_counter() < end:
            pass
        time.sleep(max(0.0, end - time.perf_counter()))
        return logits
