"""What a sample is: the data sets, their transform, and what the device does to a batch. Yours to change.

    build(cfg.data, seed)  ->  Datasets(train, val, classes)

A data set is an ordinary `torch.utils.data.Dataset`: `len()`, and `[index]` giving a uint8 image array and a label (or
any tuple of arrays and numbers whose shapes don't change). Put your own in the place of `Images`; `build` returns it.

Two rules make it fast. Images stay uint8 until they are on the device: a quarter of the bytes to move, and the device
normalises for nothing (`Prepare`). And a data set holds few Python objects: a list of a million names is copied, page
by page, into each worker that reads it; arrays are not (`fasttrain/listing.py`).

A data set may also have `unfinished(index)`, as `Transformed`: the same sample, but all draws are made while an image
may still be an `images.Crop`. The loader then draws and reads many samples before it makes their crops, straight in
the batch: it saves a quarter of the time of a packed image of 224 x 224.

One rule keeps a run repeatable: draw only from Python's, NumPy's or torch's global generators. They are seeded for each
sample from (seed, epoch, index), so its augmentation depends neither on the workers nor on the number of processes.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fasttrain import folder, images
from fasttrain.errors import UserError
from fasttrain.parts import Parts

if TYPE_CHECKING:
    from config import Data

Image = NDArray[np.uint8] | images.Crop  # a crop is made by the loader, in its place in the batch
Sample = tuple[NDArray[np.uint8], int]
IN_MEMORY = ("fashion_mnist", "cifar10")  # the data sets that torchvision fetches


# ---- a sample --------------------------------------------------------------------------------------------------------


def transform(image: images.Picture, cfg: Data, train: bool) -> Image:
    """One image to uint8 RGB [image_size, image_size, 3]: the place for your own augmentation.

    `image` is a file not yet decoded: the crops below decode it only as finely as they need, which for large photos
    saves a quarter of the time. `image.pixels()` decodes all of it, uint8 [height, width, 3]. So with torchvision's
    transforms, and `augment = v2.Compose([...])` in this file, the body may read

        pixels = torch.from_numpy(image.pixels().copy()).permute(2, 0, 1)
        return augment(pixels).permute(1, 2, 0).numpy()

    and with albumentations `return augment(image=image.pixels())["image"]`, after seeding its own generators: README.md
    shows both. What can be done for a whole batch at once, as mixup in `Prepare`, is better done on the device.

    The crops are returned as they are drawn, to be made later. To go on with one here, take its pixels:
    `pixels = images.random_resized_crop(...).pixels()`.
    """
    if not train:
        return images.center(image, cfg.image_size)
    least, most = cfg.crop_scale
    return images.random_resized_crop(image, cfg.image_size, (least, most), flip=cfg.flip)


class Transformed(Dataset[Sample]):
    """Makes the samples of a data set that has `cfg`, `train`, a length and `original(index)`, as the two below."""

    cfg: Data
    train: bool

    def original(self, index: int) -> tuple[images.Picture, int]:
        """An image before any transform, and its label: what `python -m fasttrain pack` stores."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        image, label = self.unfinished(index)
        return images.finished(image), label

    def unfinished(self, index: int) -> tuple[Image, int]:
        """The sample with all draws made, its crop perhaps not."""
        image, label = self.original(index)
        return transform(image, self.cfg, self.train), label


class Images(Transformed):
    """Images of a folder, of tar shards, or of a packed store, which spares the decoding.

    Raises, from [index]:
        ImageError: a file that can't be read or decoded, by name.
    """

    def __init__(self, listing: folder.Listing, cfg: Data, train: bool) -> None:
        self.listing, self.cfg, self.train = listing, cfg, train
        self.stored = getattr(listing, "kind", None)  # in a packed store: raw or jpeg; the verdict asks

    def __len__(self) -> int:
        return len(self.listing)

    def fingerprint(self) -> str:
        """Of names and labels: a run is not resumed within an epoch of other files."""
        return self.listing.fingerprint()

    def original(self, index: int) -> tuple[images.Picture, int]:
        return self.listing.picture(index), self.listing.label(index)

    def prefetch(self, indices: Sequence[int]) -> None:
        """Told which images of a batch come next: behind URLs they are fetched at once."""
        self.listing.prefetch(indices)


class Arrays(Transformed):
    """Images of one size that fit in memory.

    Args:
        pixels: uint8 [n, height, width] (gray) or [n, height, width, 3].
        labels: whole numbers [n].
    """

    stored = "memory"

    def __init__(self, pixels: NDArray[np.uint8], labels: Any, cfg: Data, train: bool) -> None:
        self.pixels, self.labels = pixels, np.asarray(labels, dtype=np.int64)
        self.cfg, self.train = cfg, train

    def subset(self, indices: NDArray[np.int64], train: bool) -> Arrays:
        """Those samples, for training or validation."""
        return Arrays(self.pixels[indices], self.labels[indices], self.cfg, train)

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """Of the labels."""
        return hashlib.blake2b(self.labels.tobytes(), digest_size=16).hexdigest()

    def original(self, index: int) -> tuple[images.Picture, int]:
        return images.Picture.of(self.pixels[index]), int(self.labels[index])


# ---- the data sets of a run ------------------------------------------------------------------------------------------


@dataclass
class Datasets:
    """What train.py trains on. A label is a place in `classes`, which are saved in each checkpoint."""

    train: Images | Arrays
    val: Images | Arrays
    classes: list[str]


def build(cfg: Data, seed: int) -> Datasets:
    """The training and validation images that ``data.path`` names.

    Raises:
        UserError: the folder holds no classes or images, too few to split, or validation classes that training lacks.
    """
    if cfg.path in IN_MEMORY:
        found, classes = _from_torchvision(cfg, published="train")
        training, held_out = folder.split_labels(found.labels, cfg.val_fraction, seed)  # the test set stays unseen
        return Datasets(found.subset(training, train=True), found.subset(held_out, train=False), classes)
    parts = Parts(_path(cfg), cfg.skip_list, cfg.root)
    train_files, val_files = _train_and_val(parts, cfg.val_fraction, seed)
    return Datasets(Images(train_files, cfg, train=True), Images(val_files, cfg, train=False), train_files.classes)


def build_split(cfg: Data, seed: int, split: str, classes: Sequence[str]) -> Images | Arrays:
    """One part of the data as validation sees it, without augmentation: for `python -m fasttrain evaluate`.

    Args:
        split: train, val or test (the folder test/), or all: every image of a folder that has one folder a class.
        classes: the checkpoint's classes. Labels follow them, whatever folders are here.

    Raises:
        UserError: there is no such part, or it has a class that the checkpoint doesn't know.
    """
    if cfg.path in IN_MEMORY:
        if split == "all":
            raise UserError(f"split=all: {cfg.path} is divided already; use train, val or test")
        found, names = _from_torchvision(cfg, published="test" if split == "test" else "train")
        if names != list(classes):
            mine, theirs = ", ".join(classes), ", ".join(names)
            raise UserError(f"data.path={cfg.path}: its classes ({theirs}) are not those of the checkpoint ({mine})")
        if split == "test":
            return found
        places = folder.split_labels(found.labels, cfg.val_fraction, seed)
        return found.subset(places[0 if split == "train" else 1], train=False)
    parts = Parts(_path(cfg), cfg.skip_list, cfg.root)
    where = folder.printable(parts.root)
    if split in ("train", "val"):
        files = _train_and_val(parts, cfg.val_fraction, seed, classes)[0 if split == "train" else 1]
    elif split == "test":
        if "test" not in parts.names:
            raise UserError(f"split=test: there is no folder {where}/test, or no part test in a packed store")
        files = parts.listing("test")
    elif split == "all":
        if "all" not in parts.names:
            raise UserError(
                f"split=all: {where} is divided already; use train, val or test, or name a folder of "
                f"classes: data.path={where}/train"
            )
        files = parts.listing("all")
    else:
        raise UserError(f"split={split}: expected train, val, test or all")
    return Images(files.with_classes(classes), cfg, train=False)


def _path(cfg: Data) -> str:
    """What ``data.path`` means; the demo's folder is drawn on first use."""
    if cfg.path != "shapes":
        return cfg.path
    root = Path(cfg.root) / "shapes"
    if not root.exists():
        from fasttrain import shapes  # only the demo needs it

        logger.info("drawing the demo's images into {} (once, a few seconds)", root)
        shapes.draw(root)  # not from this run's seed: other runs would find other images than they expect
    return str(root)


def _train_and_val(
    parts: Parts, fraction: float, seed: int, classes: Sequence[str] | None = None
) -> tuple[folder.Listing, folder.Listing]:
    """train and val if both are there; else `fraction` of what is there is split off, the same for the same seed.

    Labels follow `classes`, or those of the training images.
    """
    found = parts.listing(parts.names[0])  # train, or all
    splits = {"train", "training", "val", "validation", "test"} & {name.lower() for name in found.classes}
    if splits:
        named, where = ", ".join(sorted(splits)), folder.printable(parts.root)
        raise UserError(f"{where}: folders named {named} would be taken for classes; expected train/")
    found = found if classes is None else found.with_classes(classes)
    if "val" in parts.names:
        return found, parts.listing("val").with_classes(found.classes)
    train, held_out = folder.split(found, fraction, seed)
    logger.info("{} images: {} to train on, {} split off for validation", len(found), len(train), len(held_out))
    return train, held_out


def _from_torchvision(cfg: Data, published: str) -> tuple[Arrays, list[str]]:
    """The train or test part of a data set that torchvision knows, not augmented; fetched if ``data.root`` lacks it."""
    from torchvision import datasets  # half a second, so only where it is used

    kind, place = {
        "fashion_mnist": (datasets.FashionMNIST, "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
        "cifar10": (datasets.CIFAR10, "cifar-10-python.tar.gz"),
    }[cfg.path]
    patience = socket.getdefaulttimeout()
    try:
        try:
            found = kind(cfg.root, train=published == "train")
        except RuntimeError:  # not there yet
            logger.info("fetching {} into {}", cfg.path, cfg.root)
            socket.setdefaulttimeout(30)  # seconds without an answer; torchvision itself would wait for ever
            found = kind(cfg.root, train=published == "train", download=True)
    except (RuntimeError, OSError, ValueError, AssertionError) as error:  # no network, or files cut off by a kill
        reason = " ".join(str(error).split()) or "the files there are damaged"
        raise UserError(
            f"data.path={cfg.path}: not usable in {cfg.root} and not to be downloaded ({reason}); "
            f"put {place} there, or set data.path to an image folder"
        ) from error
    finally:
        socket.setdefaulttimeout(patience)
    return Arrays(np.asarray(found.data), found.targets, cfg, train=False), list(found.classes)


# ---- on the device ---------------------------------------------------------------------------------------------------


class Prepare:
    """A batch as the loader brings it to what the network takes, on the device.

    Args:
        classes: number of classes, the width of mixed labels.
        mixup, cutmix: strengths (alpha), 0 is off. With both, one of them is drawn for each batch.
    """

    def __init__(self, cfg: Data, classes: int, device: torch.device, mixup: float = 0.0, cutmix: float = 0.0) -> None:
        # (x / 255 - mean) / std as x * scale + shift; made here, since a copy from the host in a step is a sync.
        mean, std = torch.tensor(cfg.mean), torch.tensor(cfg.std)
        self.scale = (1 / (255 * std)).view(3, 1, 1).to(device)
        self.shift = (-mean / std).view(3, 1, 1).to(device)
        self.mix: Any = None
        if mixup or cutmix:
            from torchvision.transforms import v2  # half a second, so only where it is used

            makers = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]  # they draw on the CPU: no sync
            self.mix = v2.RandomChoice([make(alpha=alpha, num_classes=classes) for make, alpha in makers if alpha])

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, *, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise, and in training mix.

        Args:
            images: uint8 (N, H, W, 3) on the device.
            labels: int64 (N,).
            training: mix, if that is switched on.

        Returns:
            images: float32 (N, 3, H, W) in channels_last order: permuting only renames the axes, nothing is moved.
            labels: as they came, or float32 (N, classes) that sum to 1 where images were mixed.
        """
        normalised = (images.permute(0, 3, 1, 2) * self.scale).add_(self.shift)
        if training and self.mix is not None:
            normalised, labels = self.mix(normalised, labels)
        return normalised, labels
