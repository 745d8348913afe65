"""FFCV: the same 256 x 256 pixels in its own file, raw or as JPEG; compiled code in threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import project
from benchmarks.work import RATIO, Work, endless, module

NEEDS = ("ffcv",)
EPOCHS = 50  # in one, so that a short measurement holds few starts of its threads


class Stored:
    """The packed store's pixels, so that both hold the same."""

    def __init__(self, work: Work, store: Path) -> None:
        cfg = project.settings(work.with_data(store))
        self.data = module(work, "data").build(cfg.data, cfg.seed).train

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        picture, label = self.data.original(index)
        return Image.fromarray(picture.pixels()), label


def prepare(work: Work, into: Path) -> Path:
    import dataclasses

    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    into.mkdir(parents=True)
    store = project.prepare(dataclasses.replace(work, kind="raw"), into / "store")
    image = RGBImageField(write_mode="raw") if work.kind == "raw" else RGBImageField(write_mode="jpg", jpeg_quality=95)
    file = into / "photos.beton"
    DatasetWriter(str(file), {"image": image, "label": IntField()}, num_workers=1).from_indexed_dataset(
        Stored(work, store)
    )
    for left in store.iterdir():
        left.unlink()
    store.rmdir()
    return file


def batches(work: Work) -> Iterator[Any]:
    import numpy as np
    from ffcv.fields.decoders import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    side = (work.size, work.size)
    loader: Any = Loader(
        str(work.data),
        batch_size=work.batch,
        num_workers=work.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder(side, work.scale, RATIO),
                RandomHorizontalFlip(work.flip),
                ToTensor(),
                ToTorchImage(convert_back_int16=False),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    loader.indices = np.tile(loader.indices, EPOCHS)
    return endless(lambda: loader)
