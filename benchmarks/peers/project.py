"""This project: `data.py` and the feed, as train.py and `python -m fasttrain bench` use them."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.work import Work, module

NEEDS = ("torch", "simplejpeg", "cv2", "lmdb")


def settings(work: Work) -> Any:
    found = module(work, "fasttrain.settings")
    overrides = [
        f"data.path={work.data}",
        f"data.workers={work.workers}",
        f"data.batch_size={work.batch}",
        f"data.image_size={work.size}",
        f"data.crop_scale=[{work.scale[0]},{work.scale[1]}]",
        f"data.flip={work.flip}",
        "data.drop_last=true",
    ]
    cfg, _ = found.load(module(work, "config").Config, work.project / "config.yaml", overrides)
    return cfg


def prepare(work: Work, into: Path) -> Path:
    """`python -m fasttrain pack`, square; photos as they are need nothing."""
    if work.kind == "folder":
        return work.photos
    pack = module(work, "fasttrain.tools.pack")
    with contextlib.redirect_stdout(io.StringIO()):
        code = pack.main([str(work.photos), str(into), "--square", "--format", work.kind])
    if code:
        raise RuntimeError(f"pack gave {code}")
    return into


def batches(work: Work) -> Iterator[Any]:
    import torch

    cfg = settings(work)
    sets = module(work, "data").build(cfg.data, cfg.seed)
    feed = module(work, "fasttrain.feed").Feed(
        sets.train,
        sets.val,
        cfg.data,
        workers=work.workers,
        epochs=1 << 30,
        seed=cfg.seed,
        rank=0,
        world=1,
        device=torch.device("cpu"),
    )
    for epoch in itertools.count():
        for batch in feed.train(epoch):
            yield batch.tensors
