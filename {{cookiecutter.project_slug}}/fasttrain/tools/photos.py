"""Photos for the tour, made on the spot: of a camera's size and weight, and of nothing in particular.

Decoding costs what the number of pixels and bytes say, not what a picture shows; so smooth noise at several scales
serves, made as heavy as camera photos of 1600 x 1066 pixels are, about 420 KB.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from fasttrain import folder
from fasttrain.tools.work import Steps, ordered

WIDTH, HEIGHT = 1600, 1066
QUALITY = 88
SCALES = ((3, 70), (12, 40), (50, 22), (200, 12), (800, 7))  # spots across the picture, and their strength
GRAIN = 4  # of single pixels
BASES = 4  # pictures that all photos are mixed from, which is fast
CLASSES = 10
TOGETHER = 8  # photos made in one go

Pixels = NDArray[np.uint8]


def make(target: Path, count: int, jobs: int) -> int:
    """Write ``target/classNN/*.jpg``; the same count gives the same photos.

    Returns:
        Their mean size in bytes.
    """
    sizes: list[int] = []
    groups = [range(first, min(first + TOGETHER, count)) for first in range(0, count, TOGETHER)]
    with folder.whole(target) as part, Steps("photos", count) as steps:
        for number in range(CLASSES):
            (part / f"class{number:02d}").mkdir()
        for made in ordered(partial(_write, part, bases()), groups, jobs):
            sizes += made
            steps.advance(len(made))
    return sum(sizes) // len(sizes)


def bases() -> list[Pixels]:
    """Noise at several scales, [HEIGHT, WIDTH, 3]."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(BASES):
        picture = np.full((HEIGHT, WIDTH, 3), 128, np.float32)
        for spots, strength in SCALES:
            shape = (max(2, spots * HEIGHT // WIDTH) + 1, spots + 1, 3)
            small = rng.standard_normal(shape, dtype=np.float32)
            picture += strength * cv2.resize(small, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        picture += GRAIN * rng.standard_normal((HEIGHT, WIDTH, 1), dtype=np.float32)
        found.append(np.clip(picture, 0, 255).astype(np.uint8))
    return found


def _write(root: Path, mixed: list[Pixels], numbers: range) -> list[int]:
    """These photos; their sizes in bytes."""
    sizes = []
    for number in numbers:
        rng = np.random.default_rng(number)
        first, second = (
            np.roll(mixed[base], (int(rng.integers(HEIGHT)), int(rng.integers(WIDTH))), axis=(0, 1))
            for base in rng.integers(BASES, size=2)
        )
        pixels = np.ascontiguousarray(cv2.addWeighted(first, 0.7, second, 0.7, -51))
        jpeg = simplejpeg.encode_jpeg(pixels, quality=QUALITY, colorsubsampling="420")
        with open(os.path.join(root, f"class{number % CLASSES:02d}", f"{number:05d}.jpg"), "wb") as file:
            file.write(jpeg)
        sizes.append(len(jpeg))
    return sizes
