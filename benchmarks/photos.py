"""Photos to measure with, cut from the wallpapers of Debian packages: a network, but no data set, is needed.

    small   500x375,   about 66 KB each (the size of ImageNet's files)
    camera  1600x1066, about 420 KB each (what cameras and phones give)

The class of a photo says nothing (files are dealt out in turn). The same counts give the same files.
"""

from __future__ import annotations

import io
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

PACKAGES = ("plasma-workspace-wallpapers", "mate-backgrounds", "ukui-wallpapers")
QUALITIES = (75, 85, 90, 93, 95, 97, 98)


@dataclass(frozen=True)
class Kind:
    """Width and height in pixels, bytes that a file should reach, and how many there are."""

    size: tuple[int, int]
    target: int
    count: int


KINDS = {"small": Kind((500, 375), 90_000, 1600), "camera": Kind((1600, 1066), 430_000, 600)}


def make(root: Path, kinds: dict[str, Kind] = KINDS) -> None:
    """Make the folders `root/<kind>/train/classNN/*.jpg` that aren't there yet. Needs apt-get and dpkg."""
    missing = {name: kind for name, kind in kinds.items() if not (root / name).is_dir()}
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        sources = _wallpapers(Path(folder))
        for name, kind in missing.items():
            part = root / f".{name}.part"
            _cut(sources, part, kind)
            part.rename(root / name)


def _wallpapers(folder: Path) -> list[Path]:
    subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return sorted(path for path in folder.rglob("*.jpg") if path.stat().st_size > 250_000)


def _cut(sources: Sequence[Path], out: Path, kind: Kind) -> None:
    """Random parts of the wallpapers, at the lowest quality that gives files of the target's size."""
    rng = random.Random(0)
    for number in range(kind.count):
        with Image.open(sources[number % len(sources)]) as opened:
            image = opened.convert("RGB")
        width, height = kind.size
        scale = min(rng.uniform(1.0, 2.0), image.width / width, image.height / height)
        w, h = int(width * scale), int(height * scale)
        x, y = rng.randint(0, image.width - w), rng.randint(0, image.height - h)
        image = image.crop((x, y, x + w, y + h)).resize(kind.size, Image.Resampling.LANCZOS)
        for quality in QUALITIES:
            jpeg = io.BytesIO()
            image.save(jpeg, "JPEG", quality=quality)
            if jpeg.tell() >= kind.target:
                break
        folder = out / f"train/class{number % 10:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06d}.jpg").write_bytes(jpeg.getvalue())


def cut_to_ratio(source: Path, target: Path, most: float = 4 / 3) -> None:
    """Write the middle of a photo, at most `most` times as wide as high, as a JPEG."""
    with Image.open(source) as opened:
        image = opened.convert("RGB")
    width = min(image.width, int(image.height * most))
    left = (image.width - width) // 2
    image.crop((left, 0, left + width, image.height)).save(target, "JPEG", quality=95)
