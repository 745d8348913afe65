"""Train a network.

    python train.py                                                       one process
    torchrun --standalone --nproc-per-node=auto train.py                  one process for each GPU of this machine
    torchrun --standalone --nproc-per-node=2 train.py optimizer.lr=0.05   any setting of config.yaml can be changed

launch/ has the lines for several machines, SLURM and Kubernetes. This file is yours, and reads from top to bottom in
the order it runs. What makes it fast and safe lives in fasttrain/.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import data
import model
from config import Config
from fasttrain import machine, observe, parallel, precision, seeding, settings
from fasttrain.checkpoint import load_weights
from fasttrain.feed import Feed
from fasttrain.keeper import Keeper
from fasttrain.metrics import Means
from fasttrain.resume import fingerprint
from fasttrain.run import Run, exits_cleanly, start
from fasttrain.state import State
from fasttrain.transfer import Batch
from fasttrain.update import Schedule, Update, build_optimizer
from fasttrain.warm import Warming

HERE = Path(__file__).resolve().parent


# ---- what a training is made of --------------------------------------------------------------------------------------


def make_data(cfg: Config, run: Run) -> tuple[data.Datasets, Feed]:
    """The data sets, and the feed that brings their batches to the device."""
    # The first process of each machine goes ahead: a data set known by name is made or fetched once, not by every one.
    sets = run.first_on_machine(lambda: data.build(cfg.data, cfg.seed))
    run.stack.enter_context(Warming(cfg.data.path, cfg.data.warm, run.local_rank))
    feed = Feed(
        sets.train,
        sets.val,
        cfg.data,
        workers=machine.default_workers(run.local_world) if cfg.data.workers is None else cfg.data.workers,
        epochs=cfg.train.epochs,
        seed=cfg.seed,
        rank=run.rank,
        world=run.world,
        device=run.device,
        worker_log=run.worker_log,
        timeout=cfg.run.timeout,
    )
    run.stack.callback(feed.close)
    return sets, feed


def make_model(cfg: Config, run: Run, classes: int) -> nn.Module:
    """The network on this device, with the same weights on every rank."""
    seeding.seed_all(cfg.seed, seeding.WEIGHTS)
    net = model.build_model(cfg.model, classes, cfg.data.image_size)
    if cfg.model.weights is not None:
        load_weights(net, cfg.model.weights)
    return parallel.wrap(
        net,
        run.device,
        channels_last=cfg.model.channels_last,
        sync_batchnorm=cfg.model.sync_batchnorm,
        compile_model=cfg.model.compile,
    )


def make_update(cfg: Config, run: Run, net: nn.Module, feed: Feed) -> Update:
    """Optimizer, learning rate and mixed precision."""
    opt, steps = cfg.optimizer, -(-feed.batches() // cfg.train.accumulate) * cfg.train.epochs
    return Update(
        net,
        build_optimizer(net, opt),
        Schedule(opt.lr, steps, opt.warmup_steps, opt.final_lr),
        run.device,
        dtype=precision.choose(cfg.amp, run.device),
        accumulate=cfg.train.accumulate,
        clip_norm=cfg.train.clip_norm,
        on_nan=cfg.train.on_nan,
        names=feed.names,
    )


# ---- the training ----------------------------------------------------------------------------------------------------


def train(cfg: Config, saved: dict[str, Any], run: Run) -> None:
    sets, feed = make_data(cfg, run)
    prepare = data.Prepare(cfg.data, len(sets.classes), run.device, cfg.train.mixup, cfg.train.cutmix)
    net = make_model(cfg, run, len(sets.classes))
    update = make_update(cfg, run, net, feed)
    observe.check_metric(
        model.compute_metrics(torch.zeros(1, len(sets.classes)), torch.zeros(1).long()), cfg.checkpoint.metric
    )

    state = State()  # all that the loop counts; this, the weights and the optimizer are what a checkpoint holds
    facts = {
        "classes": sets.classes,
        "training_samples": len(sets.train),
        "training_data": fingerprint(sets.train),
        "optimizer": cfg.optimizer.name,
        "effective_batch": feed.global_batch * cfg.train.accumulate,
        "settings": saved,
    }
    keeper = Keeper(run, state, net, update, facts, cfg.checkpoint)
    report = observe.Report(run, cfg, feed, update, state, len(sets.classes))
    watch = report.watch

    # Nothing in the loop waits for the device: no .item(), no print of a loss. watch keeps the loss as a tensor and
    # has its value read batches later. One line per thing that happens to a batch; delete a mark and its time goes to
    # the next one.
    for epoch in state.remaining_epochs(cfg.train.epochs, cfg.train.max_steps, cfg.train.early_stop):
        left = update.batches_left(state, cfg.train.max_steps)
        for batch in watch.batches(feed.train(epoch, state.position, left)):  # the wait for data is timed in here
            with update.forward(batch):  # autocast; while accumulating, without a sum over the ranks
                images, labels = prepare(*batch.tensors, training=True)  # on the device: float, normalised, mixed
                loss = model.compute_loss(net(images), labels, cfg.train.label_smoothing)
            watch.mark("forward")
            update.backward(loss)
            watch.mark("backward")
            update.step_if_due(state)  # every train.accumulate batches: unscale, clip, optimizer, schedule, zero
            watch.mark("optimizer")
            state.advance(batch)
            watch.note(update.step, loss, update.lr)
            keeper.save_last_if_due(watch)  # and the place where all ranks end when a signal asks for it

        with watch.pause("validation"):  # stop the clock
            batches = run.stop.until_stopped(feed.validation())
            metrics = validate(net, batches, prepare, precision.autocast(run.device, update.dtype))
        complete = feed.batches(state.position) <= 0  # False if max_steps ended the epoch in the middle
        improved = state.finish_epoch(metrics, cfg.checkpoint.metric, cfg.checkpoint.mode, complete)
        report.epoch(epoch, state, metrics, improved)
        keeper.save_epoch(watch, metrics, improved)  # best.pt if better, last.pt to go on from

    keeper.finish(watch)  # the last files are whole on the disk
    report.end(state)


@torch.no_grad()
def validate(
    net: nn.Module, batches: Iterable[Batch], prepare: data.Prepare, autocast: AbstractContextManager[Any]
) -> dict[str, float]:
    """Means over the validation set; each sample counts once, whatever the number of processes."""
    parallel.share_buffers(net)  # all ranks judge the same network
    means = Means()
    with parallel.evaluating(net) as plain:  # ranks may differ by one batch, which DDP's own forward would wait for
        for batch in batches:
            with autocast:
                images, labels = prepare(*batch.tensors, training=False)
                logits = plain(images)
            means.add(model.compute_metrics(logits, labels))
    return means.reduce()


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    with exits_cleanly():
        cfg, saved = settings.load(Config, HERE / "config.yaml", sys.argv[1:])
        with start(saved, cfg.run, cfg.resume, HERE) as run:
            train(cfg, saved, run)


if __name__ == "__main__":  # loader workers that are not forked import this file: it must start nothing then
    main()
