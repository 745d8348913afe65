"""WebDataset: tar shards, decoded by Pillow, as its documentation shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.work import RATIO, Work, endless, files

NEEDS = ("webdataset", "torchvision")
SHARDS = 8


def prepare(work: Work, into: Path) -> Path:
    import webdataset

    listed = files(work.photos)
    into.mkdir(parents=True)
    for shard in range(SHARDS):
        with webdataset.TarWriter(str(into / f"{shard:03d}.tar")) as tar:
            for number, (path, label) in list(enumerate(listed))[shard::SHARDS]:
                tar.write({"__key__": f"{number:06d}", "jpg": Path(path).read_bytes(), "cls": label})
    return into


def batches(work: Work) -> Iterator[Any]:
    import webdataset
    from torchvision import transforms

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(work.size, work.scale, RATIO),
            transforms.RandomHorizontalFlip(work.flip),
            transforms.PILToTensor(),
        ]
    )
    data = (
        webdataset.WebDataset(sorted(map(str, work.data.glob("*.tar"))), resampled=True, shardshuffle=False)
        .shuffle(200)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(transform, lambda label: label)
        .batched(work.batch, partial=False)
    )
    loader: Any = webdataset.WebLoader(
        data, batch_size=None, num_workers=work.workers, persistent_workers=True, prefetch_factor=4
    )
    return endless(lambda: loader)
