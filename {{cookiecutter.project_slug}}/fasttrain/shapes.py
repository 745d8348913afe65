"""The demo's images: eight classes of drawn shapes and textures, made in seconds without a download.

    root/train/<class>/*.jpg   root/val/<class>/*.jpg

They are meant to be learned but not at a glance: size, place, turn and colours vary, strokes lie behind and over the
shape, small shapes of other classes distract, and blur, noise and JPEG take the edges away.
"""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from fasttrain import folder

CLASSES = ("checker", "circle", "cross", "ring", "square", "star", "stripes", "triangle")
SIDES = (48, 112)  # pixels, least and most, of each side
UPRIGHT = {
    "square": math.pi / 4,
    "star": -math.pi / 2,
    "triangle": -math.pi / 2,
}  # radians, from the first corner's place

Image = NDArray[np.uint8]
Colour = tuple[int, int, int]


def draw(root: Path, seed: int = 0, train_per_class: int = 500, val_per_class: int = 100) -> None:
    """Draw the image folder `root`; it appears whole or not at all. The same arguments give the same bytes.

    Args:
        root: the folder to make. One that is there is left as it is.
        seed: another seed draws other images.
        train_per_class, val_per_class: images of each of the eight classes.
    """
    root = Path(root)
    if root.exists():
        return
    noise = np.random.default_rng(seed).normal(0, 1, 1 << 20).astype(np.float32)
    with folder.whole(root) as part:
        for split, count in (("train", train_per_class), ("val", val_per_class)):
            for name in CLASSES:
                place = part / split / name
                place.mkdir(parents=True)
                for index in range(count):
                    rng = random.Random(f"{seed}/{split}/{name}/{index}")
                    quality = rng.randint(40, 92)
                    ok, jpeg = cv2.imencode(".jpg", _picture(name, rng, noise), [cv2.IMWRITE_JPEG_QUALITY, quality])
                    if not ok:
                        raise RuntimeError(f"OpenCV could not encode {place / str(index)}")
                    with open(os.path.join(place, f"{index:04d}.jpg"), "wb") as file:
                        file.write(jpeg.tobytes())


def _picture(name: str, rng: random.Random, noise: NDArray[np.float32]) -> Image:
    """One image, uint8 [height, width, 3], with a large shape of class `name`."""
    height, width = rng.randint(*SIDES), rng.randint(*SIDES)
    image = _background(height, width, rng)
    for _ in range(rng.randint(0, 2)):
        _stroke(image, rng)
    if rng.random() < 0.3:  # a small shape that means nothing
        _shape(image, rng.choice(CLASSES), rng, radius=rng.uniform(0.08, 0.12))
    _shape(image, name, rng, radius=rng.uniform(0.34, 0.50))
    if rng.random() < 0.5:
        _stroke(image, rng)
    if rng.random() < 0.5:
        image = np.asarray(cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 1.0)), dtype=np.uint8)
    grain = noise[(at := rng.randrange(len(noise) - image.size)) : at + image.size].reshape(image.shape)
    return np.clip(image + grain * rng.uniform(2, 15), 0, 255).astype(np.uint8)


def _background(height: int, width: int, rng: random.Random) -> Image:
    """Soft clouds around one dull colour."""
    gray, spread = rng.randint(40, 215), rng.randint(10, 40)
    base = [gray + rng.randint(-30, 30) for _ in range(3)]
    coarse = [[[c + rng.randint(-spread, spread) for c in base] for _ in range(4)] for _ in range(4)]
    small = np.clip(coarse, 0, 255).astype(np.uint8)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC), dtype=np.uint8)


def _stroke(image: Image, rng: random.Random) -> None:
    """A thin line or arc anywhere, over what is there."""
    height, width = image.shape[:2]
    a, b = ((rng.randrange(width), rng.randrange(height)) for _ in range(2))
    thick = rng.randint(1, 3)
    if rng.random() < 0.6:
        cv2.line(image, a, b, _colour(rng), thick, cv2.LINE_AA)
    else:
        axes = (rng.randint(6, width // 2), rng.randint(6, height // 2))
        turn, start = rng.randint(0, 179), rng.randint(0, 359)
        cv2.ellipse(image, a, axes, turn, start, start + rng.randint(40, 160), _colour(rng), thick, cv2.LINE_AA)


def _shape(image: Image, name: str, rng: random.Random, radius: float) -> None:
    """A shape of one class anywhere in the image; `radius` as a part of the shorter side."""
    height, width = image.shape[:2]
    radius *= min(height, width)
    x, y = (rng.uniform(0.9 * radius, side - 0.9 * radius) for side in (width, height))
    turn, squeeze = UPRIGHT.get(name, 0.0) + rng.uniform(-0.5, 0.5), rng.uniform(0.8, 1.0)
    under = image[min(int(y), height - 1), min(int(x), width - 1)]
    first, second = _contrasting(under, rng), _colour(rng)

    def polygon(points: list[tuple[float, float]]) -> Any:
        """`points` of the unit circle, squeezed, turned and put in place; in sixteenths of a pixel."""
        c, s = math.cos(turn), math.sin(turn)
        placed = [(x + radius * (c * u - s * v * squeeze), y + radius * (s * u + c * v * squeeze)) for u, v in points]
        return (np.array(placed) * 16).astype(np.int32)

    def fill(points: list[tuple[float, float]], colour: Colour) -> None:
        cv2.fillPoly(image, [polygon(points)], colour, cv2.LINE_AA, shift=4)

    if name == "circle":
        fill(_regular(28), first)
    elif name == "ring":
        thick = max(2, round(radius * rng.uniform(0.25, 0.4)))
        cv2.polylines(image, [polygon(_regular(28))], True, first, thick, cv2.LINE_AA, shift=4)
    elif name == "square":
        fill(_regular(4), first)
    elif name == "triangle":
        fill(_regular(3), first)
    elif name == "star":
        inner = rng.uniform(0.38, 0.48)
        fill([(u * r, v * r) for (u, v), r in zip(_regular(10), [1.0, inner] * 5, strict=True)], first)
    elif name == "cross":
        arm = rng.uniform(0.2, 0.28)
        for flip in (False, True):
            bar = [(-1.0, -arm), (1.0, -arm), (1.0, arm), (-1.0, arm)]
            fill([(v, u) for u, v in bar] if flip else bar, first)
    else:  # a texture, cut out as a circle or a square so that the outline doesn't tell
        colours = (first, _contrasting(first, rng, second))
        pattern = _pattern(name == "checker", height, width, turn, max(4.0, radius * rng.uniform(0.28, 0.42)))
        mask = np.zeros((height, width), np.uint8)
        cv2.fillPoly(mask, [polygon(_regular(rng.choice((4, 28))))], 1, shift=4)
        inside = mask > 0
        image[inside] = np.array(colours, np.uint8)[pattern[inside]]


def _pattern(checker: bool, height: int, width: int, turn: float, step: float) -> NDArray[np.int64]:
    """Stripes or squares `step` pixels wide: 0 or 1 for each pixel, [height, width]."""
    rows, columns = np.ogrid[:height, :width]
    c, s = math.cos(turn), math.sin(turn)
    pattern = np.floor((c * columns + s * rows) / step).astype(np.int64)
    if checker:
        pattern = pattern + np.floor((c * rows - s * columns) / step).astype(np.int64)
    return pattern & 1


def _regular(corners: int) -> list[tuple[float, float]]:
    return [(math.cos(2 * math.pi * k / corners), math.sin(2 * math.pi * k / corners)) for k in range(corners)]


def _colour(rng: random.Random) -> Colour:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _contrasting(other: Any, rng: random.Random, first: Colour | None = None) -> Colour:
    """A colour that differs from `other` enough to be seen, not more."""
    colour = first or _colour(rng)
    for _ in range(20):
        if sum(abs(int(a) - int(b)) for a, b in zip(colour, other, strict=True)) > 240:
            break
        colour = _colour(rng)
    return colour
