"""``python -m fasttrain bench [--seconds 10] [--json] [key=value ...]``: two measurements before any advice.

How fast the loader alone makes batches, how fast the step alone takes one (the same batch again and again), and both
together. The ratio of the first two says whether a training waits for data, before one has run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fasttrain import parallel, precision, settings
from fasttrain.device import pick_device
from fasttrain.feed import Feed
from fasttrain.machine import default_workers
from fasttrain.state import State
from fasttrain.tools import project
from fasttrain.transfer import Batch, leaves
from fasttrain.update import Schedule, Update, build_optimizer

PAGE = 4096  # bytes


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain bench", description="The loader, the step, and both.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(arguments)
    measured = bench(options.overrides, options.seconds)
    if options.json:
        print(json.dumps(measured))
    else:
        Console(markup=False, highlight=False, emoji=False).print(table(measured))
    return 0


def table(measured: dict[str, Any]) -> Table:
    """The measurements for people."""
    shown = Table("", "img/s", "ms a batch")
    for name, title in (("", "loader alone"), ("step_", "step alone"), ("both_", "both together")):
        images, seconds = measured[f"{name}images_per_second"], measured[f"{name}seconds"]
        shown.add_row(title, f"{images:,.0f}", f"{seconds * 1e3:.1f}")
    ratio = measured["data_ratio"]
    words = "the step would wait for data" if ratio > 1 else "the loader keeps up"
    shown.caption = f"data/compute {ratio:.2f}: {words} ({measured['workers']} workers, batch {measured['batch_size']})"
    return shown


def bench(overrides: Sequence[str], seconds: float) -> dict[str, Any]:
    """Measure in this process, on its device, with the settings of config.yaml and the overrides.

    Returns:
        images_per_second and seconds (of a batch) of the loader alone; the same with ``step_`` and ``both_`` before
        the name; data_ratio, the loader's seconds over the step's; workers, batch_size, device.
    """
    data, model, config = (project.module(name) for name in ("data", "model", "config"))
    own = ("resume=null", "data.drop_last=true")  # whole batches only, else the last ones would count as much
    cfg, _ = settings.load(config.Config, project.HOME / "config.yaml", [*own, *overrides])
    sys.stderr.write("measuring the loader alone, the step alone, and both together\n")
    device = pick_device(0, 1)
    sets = data.build(cfg.data, cfg.seed)
    workers = default_workers(1) if cfg.data.workers is None else cfg.data.workers
    epochs = 1 << 30
    feed = Feed(
        sets.train, sets.val, cfg.data, workers=workers, epochs=epochs, seed=cfg.seed, rank=0, world=1, device=device
    )
    batches = itertools.chain.from_iterable(feed.train(epoch) for epoch in range(epochs))
    step = training_step(cfg, model, data, device, len(sets.classes))

    def fetch() -> int:
        batch = next(batches)
        for tensor in leaves(batch.tensors):  # as a consumer would: every page is read
            tensor.reshape(-1)[:: max(1, PAGE // tensor.element_size())].sum()
        return batch.size

    ahead = (workers * cfg.data.prefetch_factor) + 2  # what lay ready must not count as made
    loader = _rate(fetch, ahead, seconds, feed)
    replayed = next(batches)
    replayed.tensors = tuple(tensor.clone() for tensor in leaves(replayed.tensors))  # its slot will be written again
    alone = _rate(lambda: step(replayed), 3, seconds, feed)
    both = _rate(lambda: step(next(batches)), ahead, seconds, feed)
    feed.close()
    result: dict[str, Any] = {}
    for name, (images, each) in (("", loader), ("step_", alone), ("both_", both)):
        result |= {f"{name}images_per_second": images, f"{name}seconds": each}
    return result | {
        "data_ratio": loader[1] / alone[1],
        "workers": workers,
        "batch_size": cfg.data.batch_size,
        "device": str(device),
    }


def training_step(cfg: Any, model: Any, data: Any, device: Any, classes: int) -> Callable[[Batch], int]:
    """One training step on a batch, as train.py does it."""
    prepare = data.Prepare(cfg.data, classes, device, cfg.train.mixup, cfg.train.cutmix)
    net = parallel.wrap(
        model.build_model(cfg.model, classes, cfg.data.image_size),
        device,
        channels_last=cfg.model.channels_last,
        sync_batchnorm=False,
        compile_model=cfg.model.compile,
    )
    dtype = precision.choose(cfg.amp, device)
    # A rate of nearly nothing: the same batch again and again must not make the weights grow.
    update = Update(net, build_optimizer(net, cfg.optimizer), Schedule(1e-9, 1 << 30, 0, 1.0), device, dtype=dtype)
    state = State()

    def step(batch: Batch) -> int:
        with update.forward(batch):
            images, labels = prepare(*batch.tensors, training=True)
            loss = model.compute_loss(net(images), labels, cfg.train.label_smoothing)
        update.backward(loss)
        update.step_if_due(state)
        return batch.size

    return step


def _rate(once: Callable[[], int], warm_up: int, seconds: float, feed: Feed) -> tuple[float, float]:
    """Images a second, and seconds a call, of calls for this long, after some that don't count."""
    for _ in range(warm_up):
        once()
    feed.clock.settle()
    images = calls = 0
    began = time.perf_counter()
    while calls < 3 or time.perf_counter() - began < seconds:
        images += once()
        calls += 1
    feed.clock.settle()
    spent = time.perf_counter() - began
    return images / spent, spent / calls
