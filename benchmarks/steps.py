"""What each step costs on one core, library by library: ms for one photo, the least of three rounds."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.work import RATIO, Work, files, module

SAMPLES = 40
ROUNDS = 3
SIZE = 224


def measure(photos: Path, project: Path) -> dict[str, float]:
    """Milliseconds of each step for a photo of this folder, by the name of the step. CPU time of this process."""
    listed = files(photos)
    contents = [Path(path).read_bytes() for path, _ in listed[:: max(1, len(listed) // SAMPLES)][:SAMPLES]]
    return {name: _least(step, contents) for name, step in _steps(Work(photos, photos, project), contents).items()}


def _least(step: Callable[[Any], Any], contents: Sequence[bytes]) -> float:
    times = []
    for _ in range(ROUNDS):
        random.seed(0)
        began = time.process_time()
        for number in range(len(contents)):
            step(number)
        times.append((time.process_time() - began) * 1e3 / len(contents))
    return min(times)


def _steps(work: Work, contents: Sequence[bytes]) -> dict[str, Callable[[int], Any]]:
    import cv2
    import numpy as np
    import simplejpeg
    import torch
    from PIL import Image
    from torchvision.io import decode_jpeg
    from torchvision.transforms import v2

    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    images = module(work, "fasttrain.images")
    pixels = [simplejpeg.decode_jpeg(content) for content in contents]
    pillows = [Image.fromarray(array) for array in pixels]
    raw = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    tensors = [decode_jpeg(content) for content in raw]
    pictures = [images.Picture.of(array) for array in pixels]
    small = np.ascontiguousarray(pixels[0][:SIZE, :SIZE])
    cut = v2.RandomResizedCrop(SIZE, (0.08, 1.0), RATIO)
    seeding = module(work, "fasttrain.seeding")

    def whole(number: int) -> Any:
        return images.random_resized_crop(images.Picture(contents[number], ""), SIZE, (0.08, 1.0), flip=0.5).pixels()

    return {
        "decode: Pillow": lambda n: Image.open(io.BytesIO(contents[n])).convert("RGB"),
        "decode: torchvision": lambda n: decode_jpeg(raw[n]),
        "decode: simplejpeg": lambda n: simplejpeg.decode_jpeg(contents[n]),
        "random crop and resize: torchvision, Pillow image": lambda n: cut(pillows[n]),
        "random crop and resize: torchvision, uint8 tensor": lambda n: cut(tensors[n]),
        "random crop and resize: this project (OpenCV)": lambda n: images.random_resized_crop(
            pictures[n], SIZE, (0.08, 1.0)
        ).pixels(),
        "flip: OpenCV": lambda n: cv2.flip(small, 1),
        "seeding three generators for a sample": lambda n: seeding.seed_all(n, start=1),
        "all of it, as this project does it": whole,
    }
