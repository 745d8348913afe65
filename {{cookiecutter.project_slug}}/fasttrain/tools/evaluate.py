"""``python -m fasttrain evaluate CHECKPOINT [--split val] [--json] [key=value ...]``: the metrics of a checkpoint.

The settings are those saved in the checkpoint, so that the network and the data are the ones it was trained with;
overrides change them, ``data.path=other/images`` for instance.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from fasttrain import checkpoint, parallel, precision, settings
from fasttrain.device import pick_device
from fasttrain.errors import UserError, one_line
from fasttrain.feed import Feed
from fasttrain.machine import default_workers
from fasttrain.tools import project

SPLITS = ("val", "train", "test", "all")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttrain evaluate", description="The metrics of a checkpoint.")
    parser.add_argument("checkpoint", help="best.pt or last.pt of a run")
    parser.add_argument("--split", choices=SPLITS, default="val", help="all: every image of a folder of classes")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of text")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    options = parser.parse_intermixed_args(arguments)

    metrics, count = evaluate(options.checkpoint, options.split, options.overrides)
    if options.json:
        print(json.dumps({"checkpoint": options.checkpoint, "split": options.split, "images": count, **metrics}))
    else:
        print(f"{options.checkpoint} on {options.split} ({count} images)")
        print("\n".join(f"  {name:<12} {value:.5f}" for name, value in metrics.items()))
    return 0


def evaluate(path: str, split: str, overrides: Sequence[str]) -> tuple[dict[str, float], int]:
    """The metrics of a checkpoint on a split of the data, and the number of images they are taken over."""
    data, model, train = (project.module(name) for name in ("data", "model", "train"))
    content = checkpoint.load(path)
    try:
        saved, classes, weights = content["facts"]["settings"], content["facts"]["classes"], content["model"]
    except (KeyError, TypeError):
        raise UserError(f"{path}: not a checkpoint of this project: it has no settings and classes") from None
    # What a training started from need not be there any more, and no sample of a small split is left out.
    own = ("resume=null", "model.weights=null", "data.drop_last=false")
    cfg, _ = settings.load(project.module("config").Config, saved, [*own, *overrides])

    device = pick_device(0, 1)
    dataset = data.build_split(cfg.data, cfg.seed, split, classes)
    workers = default_workers(1) if cfg.data.workers is None else cfg.data.workers
    feed = Feed(dataset, dataset, cfg.data, workers=workers, epochs=1, seed=cfg.seed, rank=0, world=1, device=device)
    net = model.build_model(cfg.model, len(classes), cfg.data.image_size)
    try:
        net.load_state_dict(checkpoint.clean_keys(weights, net.state_dict()))
    except RuntimeError as error:
        raise UserError(f"{path}: does not fit model.name={cfg.model.name}: {one_line(error)}") from None
    net = parallel.wrap(
        net, device, channels_last=cfg.model.channels_last, sync_batchnorm=False, compile_model=cfg.model.compile
    )
    prepare = data.Prepare(cfg.data, len(classes), device, 0.0, 0.0)
    dtype = precision.choose(cfg.amp, device)
    metrics: dict[str, float] = train.validate(net, feed.validation(), prepare, precision.autocast(device, dtype))
    feed.close()
    return metrics, len(dataset) - feed.val_skips.count
