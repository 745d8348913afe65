"""``python -m fasttrain pack SOURCE OUT``: decode and shrink a data set once, into one LMDB file (fasttrain/packed.py).

The random crop and the flip stay for the training; what is gone is decoding, most of the work of every epoch. A pack
that was stopped, by Ctrl-C or kill -9, goes on when the same command is run again.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fasttrain import images, machine, packed, settings, shards
from fasttrain.errors import UserError
from fasttrain.folder import printable
from fasttrain.images import Picture
from fasttrain.tools import project
from fasttrain.tools.pack_source import Form, Packer, Source, from_data, from_parts
from fasttrain.tools.pack_store import Writer, short
from fasttrain.tools.work import Steps, ordered

TOGETHER = 16  # images that go to a worker process at once
SAMPLE = 48  # images that the size is predicted from, and as many that are compared at the end
PAGE = 4096  # bytes; LMDB's values begin at a page of their own
SHOWN = 20  # broken images that are listed; all of them are in check-data's list


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    overrides = [f"data.path={options.source}", *options.overrides]
    cfg, _ = settings.load(project.module("config").Config, project.HOME / "config.yaml", overrides)
    form = Form(options.format, options.size, options.square, options.quality)
    root, out = Path(cfg.data.path), Path(options.out).absolute()
    is_folder = root.is_absolute() and root.is_dir()  # a data set known by name is not absolute
    is_known = is_folder or (cfg.data.path not in project.module("data").IN_MEMORY and shards.is_shards(cfg.data.path))
    if is_folder and (out == root or root in out.parents):
        raise UserError(f"{printable(out)}: lies in the source, {printable(root)}; name a folder outside of it")
    if is_known and not options.dataset:
        source = from_parts(cfg.data.path, cfg.data.skip_list, cfg.data.root)
    else:
        source, whole = from_data(cfg.data, cfg.seed)
        if not whole:
            say("data.py's data set has no original(index): packing what validation sees, after its transform")
    plan = {"source": cfg.data.path, "form": vars(form), "fingerprint": source.fingerprint()}
    jobs = options.jobs or machine.cores()
    with Writer(out, plan, len(source)) as writer:
        say(f"{len(source)} images of {len(source.classes)} classes, {jobs} processes -> {printable(out)}")
        predict(source, form, out, writer.done)
        try:
            pack(source, form, writer, jobs, cfg.data.start_method)
        except KeyboardInterrupt:  # perhaps in the middle of a transaction: what isn't in yet is packed again
            say(f"stopped after about {writer.done} of {len(source)} images; the same command goes on there")
            raise
        if writer.broken:
            _list_broken(writer.broken, options.skip_broken)
            if not options.skip_broken:
                return 1
        left = writer.finish(source.names(), source.classes, {part.name: len(part) for part in source.parts})
    verify(source, form, out, writer.labels)
    parts = ", ".join(f"{count} {part}" for part, count in left.items())
    say(f"{printable(out)}: {parts}; {os.path.getsize(out / packed.FILE) / 1e6:,.1f} MB, checked. Train on it with")
    say(f"    python train.py data.path={printable(out)}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fasttrain pack", description="Decode and shrink a data set once, into one LMDB file."
    )
    parser.add_argument("source", help="an image folder, tar shards, or whatever data.path may be")
    parser.add_argument("out", help="folder of the store; one that was stopped half-way is gone on with")
    parser.add_argument(
        "--format", choices=("raw", "jpeg"), default="raw", help="raw pixels (fastest) or JPEG (smaller)"
    )
    parser.add_argument("--size", type=_at_least_one, default=256, help="pixels of the short side; none is enlarged")
    parser.add_argument("--square", action="store_true", help="only the middle, size x size")
    parser.add_argument("--quality", type=_percent, default=95, help="of the JPEGs, 1 to 100")
    parser.add_argument("--jobs", type=_at_least_one, help="processes that decode; the cores this one may use")
    parser.add_argument(
        "--dataset", action="store_true", help="pack what data.py builds, also where source is a folder"
    )
    parser.add_argument("--skip-broken", action="store_true", help="leave out images that can't be decoded")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change")
    return parser.parse_intermixed_args(arguments)


def predict(source: Source, form: Form, out: Path, done: int) -> None:
    """Say the size of the store and what it will bring, from a sample; refuse a disk without room for it.

    Raises:
        UserError: too little free disk.
    """
    packer = Packer(source, form)
    sizes: list[int] = []
    before: list[float] = []
    after: list[float] = []
    for place in random.Random(0).sample(range(len(source)), min(SAMPLE, len(source))):
        value = packer.one(place).value
        if value is not None:  # else it is told when its turn comes
            sizes.append(len(value))
            before.append(_seconds(partial(_original, source, place), form.size))
            after.append(_seconds(partial(_unpacked, value, form), form.size))
    if not sizes:
        return
    mean = float(np.mean([-(-(size + 16) // PAGE) * PAGE if size > PAGE // 2 else size for size in sizes]))
    size, left = mean * len(source) * 1.005, mean * (len(source) - done) * 1.005
    free = shutil.disk_usage(out).free
    old, new = (1000 * float(np.median(seconds)) for seconds in (before, after))
    say(f"about {size / 1e6:,.1f} MB when done; {free / 1e6:,.0f} MB are free")
    say(f"a training sample takes {old:.2f} ms of one core now, {new:.2f} ms from the store")
    if left > free:
        raise UserError(
            f"{printable(out)}: about {left / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free: make room, or "
            "take a smaller --size or --format jpeg"
        )


def _seconds(picture: Callable[[], Picture], size: int) -> float:
    """What one training sample costs: reading, random crop, resize."""
    began = time.perf_counter()
    images.random_resized_crop(picture(), min(224, size), (0.08, 1.0), rng=random.Random(0)).pixels()
    return time.perf_counter() - began


def _original(source: Source, place: int) -> Picture:
    part, index = source.at(place)
    return part.read(index)[0]


def _unpacked(value: bytes, form: Form) -> Picture:
    if form.kind == "jpeg":
        return Picture(value, "")
    pixels = np.frombuffer(value, np.uint8, offset=packed.SHAPE.size)
    return Picture.of(pixels.reshape(*packed.SHAPE.unpack_from(value), 3))


def pack(source: Source, form: Form, writer: Writer, jobs: int, method: str | None = None) -> None:
    """Pack what is not packed yet; images that were broken last time get another chance, and those changed since."""
    _forget_changed(source, writer)
    again, total = sorted(writer.broken), len(source)
    chunks = [[place] for place in again]
    chunks += [list(range(at, min(at + TOGETHER, total))) for at in range(writer.done, total, TOGETHER)]
    with Steps("packing", total, writer.done - len(again)) as steps:
        results = ordered(Packer(source, form), chunks, min(jobs, max(1, len(chunks))), method)
        for places, made in zip(chunks, results, strict=True):
            writer.add(places[0], [source.name(place) for place in places], made)
            steps.advance(len(places))
    writer.commit()


def _forget_changed(source: Source, writer: Writer) -> None:
    """Of what an earlier start packed, take out what comes from files that were changed since."""
    changed = []
    for place in np.flatnonzero(writer.stamps * (writer.labels >= 0)).tolist():
        part, index = source.at(place)
        if short(part.stamp(index)) != writer.stamps[place]:
            changed.append(place)
    if changed:
        names = [source.name(place) for place in changed]
        say(f"{len(changed)} files were changed since they were packed, {printable(names[0])} for one: packed anew")
        writer.forget(changed, names, "was changed since it was packed")


def verify(source: Source, form: Form, out: Path, labels: NDArray[np.int32]) -> None:
    """Read the store as training does: count, all labels, and the pixels of a sample.

    Args:
        labels: of each place of the source, -1 where the image was left out.

    Raises:
        UserError: anything differs from the source.
    """
    kept = labels >= 0
    store, count = packed.load(out), int(kept.sum())
    if (found := packed.entries(str(out)) - 3) != count:
        raise UserError(f"{printable(out)}: holds {found} images, {count} were packed: pack it anew")
    stored = np.concatenate([listing.labels for listing in store.listings.values()])
    if not np.array_equal(stored, labels[kept]):
        raise UserError(f"{printable(out)}: labels are not those that were packed: pack it anew")
    packer = Packer(source, form)
    for place in random.Random(1).sample(np.flatnonzero(kept).tolist(), min(SAMPLE, count)):
        made, name = packer.one(place), source.name(place)
        if packed.read_value(str(out), name) != made.value or made.label != labels[place]:
            raise UserError(f"{printable(out)}: {printable(name)} is not what the source gives now: pack it anew")
    packed.close(out)


def _list_broken(broken: dict[int, str], skip: bool) -> None:
    for reason in list(broken.values())[:SHOWN]:
        say(f"broken: {reason}")
    if len(broken) > SHOWN:
        say(f"and {len(broken) - SHOWN} more")
    what = "left out" if skip else "not finished: mend them and run the same command again, or add --skip-broken"
    say(f"{len(broken)} broken images: {what}")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least 1")
    return int(text)


def _percent(text: str) -> int:
    if not 1 <= (number := _at_least_one(text)) <= 100:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to 100")
    return number
