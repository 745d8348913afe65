"""torchdata.nodes with threads, given the project's decode function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.spdl import endless_paths
from benchmarks.work import Work, decode, endless

NEEDS = ("torchdata.nodes", "simplejpeg", "cv2")


def batches(work: Work) -> Iterator[Any]:
    import numpy as np
    from torchdata import nodes

    source = nodes.IterableWrapper(endless_paths(work))
    decoded = nodes.ParallelMapper(source, decode(work), num_workers=work.workers, method="thread", in_order=False)
    batched = nodes.Mapper(nodes.Batcher(decoded, work.batch, drop_last=True), np.stack)
    loader: Any = nodes.Loader(nodes.Prefetcher(batched, prefetch_factor=4))
    return endless(lambda: loader)
