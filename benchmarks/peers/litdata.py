"""LitData: the JPEG files in its chunks, decoded by torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.work import RATIO, Work, endless, files

NEEDS = ("litdata", "torchvision")


def _sample(item: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    return {"image": Image.open(item[0]), "label": item[1]}  # stored as the file's bytes


def prepare(work: Work, into: Path) -> Path:
    import litdata

    inputs = files(work.photos)
    litdata.optimize(
        _sample, inputs, str(into), chunk_bytes="64MB", num_workers=work.workers, start_method="fork", verbose=False
    )
    return into


def batches(work: Work) -> Iterator[Any]:
    import litdata
    from torchvision.transforms import v2

    transform = v2.Compose([v2.RandomResizedCrop(work.size, work.scale, RATIO), v2.RandomHorizontalFlip(work.flip)])

    class Photos(litdata.StreamingDataset):  # type: ignore[misc]  # its type depends on what is installed
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return transform(sample["image"]), sample["label"]

    loader: Any = litdata.StreamingDataLoader(
        Photos(str(work.data), shuffle=True, drop_last=True),
        batch_size=work.batch,
        num_workers=work.workers,
        persistent_workers=True,
        prefetch_factor=4,
    )
    return endless(lambda: loader)
