"""One competitor, in a process of its own: `python -m benchmarks.measure MODE PEER JSON` prints a line of JSON.

prepare   convert the photos          -> data, seconds
speed     take batches for some time  -> images_per_second, cpu_ms (of all its processes, for each image)
pixels    convert, take a fixed crop -> difference (mean, of 255) to Pillow's antialiased resize
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.work import Work, files

PAGE = 4096  # bytes
WARM_UP = 0.7  # seconds after the first batch
LEAST = 12  # batches of a measurement; workers deliver in bursts


def missing(peer: str) -> str | None:
    """The module that this competitor needs and that isn't installed."""
    for name in importlib.import_module(f"benchmarks.peers.{peer}").NEEDS:
        try:
            if importlib.util.find_spec(name) is None:
                return str(name)
        except ModuleNotFoundError:  # of its parent
            return str(name)
    return None


def array(batch: Any) -> Any:
    """The images of a batch as a NumPy array, without a copy."""
    import numpy as np

    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    return np.asarray(first)


def touch(images: Any) -> int:
    """Read one byte of every page, in the order in which they lie in memory."""
    import numpy as np

    in_memory = images.transpose(np.argsort([-stride for stride in images.strides], kind="stable"))
    return int(in_memory.reshape(-1)[::PAGE].sum())


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def speed(batches: Iterator[Any], seconds: float) -> dict[str, float]:
    """Images a second, from the arrival of one batch to that of another."""
    took = time.perf_counter()
    images = array(next(batches))
    assert images.dtype == "uint8", f"the batch is {images.dtype}"
    first = time.perf_counter()
    while time.perf_counter() - first < WARM_UP:
        touch(array(next(batches)))
    cpu, began, count, taken = cpu_seconds(), time.perf_counter(), 0, 0
    while taken < LEAST or time.perf_counter() - began < seconds:
        images = array(next(batches))
        touch(images)
        count += len(images)
        taken += 1
    spent = time.perf_counter() - began
    return {
        "images_per_second": count / spent,
        "cpu_ms": (cpu_seconds() - cpu) * 1e3 / count,
        "first_batch": first - took,
    }


def difference(batches: Iterator[Any], work: Work) -> float:
    """Mean absolute difference to Pillow's antialiased resize of the same photo, or of its middle square if packed.

    Each image is compared with the photo it is closest to, since competitors have orders of their own.
    """
    import numpy as np
    from PIL import Image

    references = []
    for path, _ in files(work.photos):
        with Image.open(path) as opened:
            photo = opened.convert("RGB")
        width, height = photo.size if work.kind == "folder" else (min(photo.size), min(photo.size))
        left, top = (photo.width - width) // 2, (photo.height - height) // 2
        box = (left, top, left + width, top + height)
        resized = photo.resize((work.size, work.size), Image.Resampling.BILINEAR, box=box)
        references.append(np.asarray(resized).astype(np.int16))
    images = array(next(batches)).astype(np.int16)
    if images.shape[1] == 3:
        images = images.transpose(0, 2, 3, 1)
    closest = [min(float(np.abs(image - reference).mean()) for reference in references) for image in images]
    return sum(closest) / len(closest)


def main(mode: str, peer: str, asked: dict[str, Any]) -> dict[str, Any]:
    if (lacking := missing(peer)) is not None:
        return {"missing": lacking}
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    work = Work.read(asked["work"])
    if mode == "speed":
        return speed(module.batches(work), asked["seconds"])
    began = time.perf_counter()
    data = module.prepare(work, Path(asked["into"])) if hasattr(module, "prepare") else work.photos
    if mode == "prepare":
        return {"data": str(data), "seconds": time.perf_counter() - began}
    return {"difference": difference(module.batches(work.with_data(data)), work)}


if __name__ == "__main__":
    line = json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
    print(f"\n{line}", flush=True)
    os._exit(0)  # threads and workers of some competitors would keep it alive; run.py ends those
