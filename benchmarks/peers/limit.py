"""No loader at all: the project's function on one core, into memory that is there already.

Times the cores it is the limit of any loader with this function: nothing is handed over, collated or seeded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.peers import project
from benchmarks.work import Work, module

NEEDS = project.NEEDS
prepare = project.prepare


def batches(work: Work) -> Iterator[Any]:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)
    cfg = project.settings(work)
    images = module(work, "fasttrain.images")
    store = module(work, "data").build(cfg.data, cfg.seed).train
    batch = np.empty((work.batch, work.size, work.size, 3), np.uint8)
    while True:
        for place in batch:
            picture, _ = store.original(random.randrange(len(store)))
            images.random_resized_crop(picture, work.size, work.scale, flip=work.flip).write(place)
        yield batch
