"""SPDL's pipeline of threads, given the project's decode function."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.work import Work, decode, files

NEEDS = ("spdl.pipeline", "simplejpeg", "cv2")


def endless_paths(work: Work) -> Iterator[str]:
    paths = [path for path, _ in files(work.data)]
    while True:
        random.shuffle(paths)
        yield from paths


def batches(work: Work) -> Iterator[Any]:
    import numpy as np
    from spdl.pipeline import PipelineBuilder

    pipeline = (
        PipelineBuilder()
        .add_source(endless_paths(work))
        .pipe(decode(work), concurrency=work.workers)
        .aggregate(work.batch, drop_last=True)
        .pipe(np.stack)
        .add_sink(4)
        .build(num_threads=work.workers)
    )
    with pipeline.auto_stop():
        yield from pipeline
