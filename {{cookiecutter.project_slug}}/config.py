"""The settings' names and types. Their values stand in config.yaml; this file says what a value may be.

`value(...)` gives the limits that are checked before any work. A new setting is one line here and one in config.yaml;
train.py then reads it as `cfg.section.name`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fasttrain.settings import location, value

DATASETS = ("shapes", "fashion_mnist", "cifar10")  # the data sets that data.py knows by name


@dataclass
class Run:
    dir: str | None = location()  # the run directory
    timeout: float = value(above=0)  # seconds
    threads: int | None = value(low=1)  # of PyTorch, in each training process
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = value()


@dataclass
class Data:
    path: str = location(must_exist=True, or_name=DATASETS, or_pattern=True)  # images, store, shards or a name
    root: str = location()  # where the data sets known by name are kept
    val_fraction: float = value(above=0, below=1)  # part split off for validation
    skip_list: str | None = location(must_exist=True)  # a file, one path a line
    warm: bool = value()
    image_size: int = value(low=1)  # pixels, both sides
    crop_scale: list[float] = value(above=0, high=1, length=2, ordered=True)  # area of the random crop, least and most
    flip: float = value(low=0, high=1)  # probability
    mean: list[float] = value(length=3)  # per channel, images scaled to 0..1
    std: list[float] = value(above=0, length=3)
    batch_size: int = value(low=1)  # samples per process
    shuffle: bool = value()
    on_error: Literal["fail", "skip"] = value()
    drop_last: bool = value()
    workers: int | None = value(low=0)  # loader processes per training process; null: one a core, at most 16
    prefetch_factor: int = value(low=1)  # batches per worker
    persistent_workers: bool = value()
    pin_memory: bool | None = value()
    start_method: Literal["fork", "spawn", "forkserver"] | None = value()


@dataclass
class Model:
    name: str = value()
    weights: str | None = location(must_exist=True)  # a checkpoint
    compile: bool = value()
    channels_last: bool = value()
    sync_batchnorm: bool = value()
    stand_in_ms: float = value(low=0)  # milliseconds of a forward pass
    stand_in_holds_interpreter: bool = value()


@dataclass
class Train:
    epochs: int = value(low=1)
    max_steps: int | None = value(low=1)  # optimizer steps
    accumulate: int = value(low=1)  # batches per optimizer step
    on_nan: Literal["stop", "skip"] = value()
    clip_norm: float | None = value(above=0)
    label_smoothing: float = value(low=0, below=1)
    mixup: float = value(low=0)  # alpha of the beta distribution
    cutmix: float = value(low=0)
    early_stop: int | None = value(low=1)  # epochs


@dataclass
class Optimizer:
    name: Literal["sgd", "adamw"] = value()
    lr: float = value(above=0)
    momentum: float = value(low=0, below=1)
    betas: list[float] = value(low=0, below=1, length=2)
    weight_decay: float = value(low=0)
    warmup_steps: int = value(low=0)  # optimizer steps
    final_lr: float = value(low=0, high=1)  # as a part of lr


@dataclass
class Checkpoint:
    metric: str = value()
    mode: Literal["max", "min"] = value()
    every_minutes: float = value(above=0)
    every_steps: int | None = value(low=1)  # optimizer steps
    stop_seconds: float = value(above=0)


@dataclass
class Dashboard:
    every: int = value(low=1)  # batches
    window: int = value(low=1)  # batches
    tensorboard: bool = value()


@dataclass
class Profile:
    steps: int | None = value(low=1)  # batches
    start: int = value(low=0)  # batches before them
    ranks: list[int] = value(low=0)


@dataclass(kw_only=True)  # a type checker takes value() for a default, after which the sections would need one
class Config:
    """All of it: what settings.load returns, and what `cfg` is in train.py."""

    seed: int = value(low=0)
    resume: str | None = location(must_exist=True, or_name=("auto",))
    amp: Literal["auto", "bf16", "fp16", "off"] = value()
    run: Run
    data: Data
    model: Model
    train: Train
    optimizer: Optimizer
    checkpoint: Checkpoint
    dashboard: Dashboard
    profile: Profile
