"""torchvision's ImageFolder and transforms with the stock DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.work import RATIO, Work, endless

NEEDS = ("torch", "torchvision")


def batches(work: Work, tuned: bool = False) -> Iterator[Any]:
    """As most people begin (`tuned=False`: no workers), or with workers that stay and prefetch."""
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(work.size, work.scale, RATIO),
            transforms.RandomHorizontalFlip(work.flip),
            transforms.PILToTensor(),
        ]
    )
    more: dict[str, Any] = {}
    if tuned:
        more = {"num_workers": work.workers, "persistent_workers": True, "prefetch_factor": 4}
    folder = datasets.ImageFolder(str(work.data), transform)
    loader: Any = DataLoader(folder, batch_size=work.batch, shuffle=True, drop_last=True, **more)
    return endless(lambda: loader)
