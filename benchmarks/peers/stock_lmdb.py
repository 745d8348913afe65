"""The stock DataLoader over the project's packed store: the same reading and resizing, handed over as usual."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers import project
from benchmarks.work import Work, alone, endless, module

NEEDS = project.NEEDS
prepare = project.prepare


def batches(work: Work) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    cfg = project.settings(work)
    store = module(work, "data").build(cfg.data, cfg.seed).train
    loader: Any = DataLoader(
        store,
        batch_size=work.batch,
        sampler=RandomSampler(store, replacement=True, num_samples=1 << 24),  # no end of an epoch
        num_workers=work.workers,
        prefetch_factor=4,
        worker_init_fn=alone,
        generator=torch.Generator().manual_seed(0),
    )
    return endless(lambda: loader)
