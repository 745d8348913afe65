"""timm's `create_loader` over its own image folder. Its last step, normalising on the device, is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.work import RATIO, Work, endless

NEEDS = ("timm",)


def batches(work: Work) -> Iterator[Any]:
    import torch
    from timm.data import create_dataset, create_loader

    loader: Any = create_loader(
        create_dataset("", str(work.data), is_training=True),
        input_size=(3, work.size, work.size),
        batch_size=work.batch,
        is_training=True,
        scale=work.scale,
        ratio=RATIO,
        hflip=work.flip,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=work.workers,
        persistent_workers=True,
        device=torch.device("cpu"),
    )
    return endless(lambda: loader.loader)  # uint8, before the prefetcher that makes them float
