"""Metrics over all samples and ranks, each sample counted once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from fasttrain.errors import UserError


class Means:
    """Sums per-sample values on the device and divides once, at the end, over all ranks.

    Sums are float64, so that neither the number of processes nor the batch size shows in the result.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._count = 0

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take in one batch: for each metric a tensor of shape (N,), a value a sample. No sync."""
        for name, value in values.items():
            wide = torch.float32 if value.device.type == "mps" else torch.float64  # MPS has no float64
            total = value.detach().sum(dtype=wide)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._count += len(next(iter(values.values())))

    def reduce(self) -> dict[str, float]:
        """The means over all ranks; every rank must call it, also one that had no batch. Waits for the device.

        Raises:
            UserError: no rank had a sample.
        """
        names = sorted(self._sums)
        if dist.is_initialized():
            everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyones, names)
            names = sorted(set().union(*everyones))
        zero = torch.zeros((), dtype=torch.float64)
        sums = torch.stack([*(self._sums.get(n, zero).cpu().double() for n in names), zero + self._count])
        if dist.is_initialized():
            dist.all_reduce(sums)
        if not sums[-1]:
            raise UserError("no validation sample could be read: the warnings above name the files")
        return {name: float(total / sums[-1]) for name, total in zip(names, sums[:-1], strict=True)}
