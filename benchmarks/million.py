"""What an index of a million files costs: `python -m benchmarks.million [--files 1000000]`.

Three epochs over a folder of that many small JPEGs (hard links to a few, in nested folders) with two workers. Memory is
PSS, which counts a page that n processes share as 1/n for each: the sum over the training process and its workers is
what the machine really holds. From it the same for a folder of 1,000 files is taken; the rest is the index.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.run import HERE, TEMPLATE
from benchmarks.work import Work, module

EPOCHS = 3
SMALL = 1000  # files of the folder to compare with
ORIGINALS = 64  # files; ext4 allows 65,000 names for each
IN_A_FOLDER = 1000


def make(root: Path, count: int) -> Path:
    """The folder `root/<count>/<class>/<subfolder>/<file>`, made once."""
    from PIL import Image

    target = root / str(count)
    if target.is_dir():
        return target
    part = root / f".{count}.part"
    originals = []
    for number in range(ORIGINALS):
        original = root / f"original{number:02d}.jpg"
        original.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 255 - number, 99)).save(original)
        originals.append(original)
    for first in range(0, count, IN_A_FOLDER):
        folder = part / f"class{first // IN_A_FOLDER % 100:02d}" / f"session{first // IN_A_FOLDER:05d}"
        folder.mkdir(parents=True)
        for number in range(first, min(first + IN_A_FOLDER, count)):
            os.link(originals[number % ORIGINALS], folder / f"IMG_{number:08d}.jpg")
    part.rename(target)
    return target


def memory(pid: int) -> tuple[float, float]:
    """PSS and USS of a process, MB."""
    sizes = {}
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if rest.strip().endswith("kB"):
                sizes[name] = int(rest.split()[0]) / 1e3
    return sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"]


def measure(folder: Path, workers: int) -> dict[str, Any]:
    """Three epochs in this process: seconds to list the files and to the first batch, memory after each epoch."""
    import psutil
    import torch

    work = Work(folder, folder, TEMPLATE)
    own = [f"data.path={folder}", "data.image_size=8", "data.crop_scale=[0.5,1]", "data.batch_size=256"]
    cfg, _ = module(work, "fasttrain.settings").load(
        module(work, "config").Config, TEMPLATE / "config.yaml", [*own, f"data.workers={workers}"]
    )
    began = time.perf_counter()
    sets = module(work, "data").build(cfg.data, cfg.seed)
    listed = time.perf_counter()
    place = {"workers": workers, "epochs": EPOCHS, "seed": 0, "rank": 0, "world": 1, "device": torch.device("cpu")}
    feed = module(work, "fasttrain.feed").Feed(sets.train, sets.val, cfg.data, **place)
    started, totals, private = 0.0, [], []
    for epoch in range(EPOCHS):
        for batch in feed.train(epoch):
            started = started or time.perf_counter() - listed
            if batch.number == batch.last:  # workers end with the last epoch
                processes = [os.getpid(), *(child.pid for child in psutil.Process().children())]
                each = [memory(pid) for pid in processes]
                totals.append(sum(pss for pss, _ in each))
                private.append(sum(uss for _, uss in each[1:]))
    feed.close()
    return {"listing": listed - began, "started": started, "pss": totals, "workers_uss": private}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.million", description="The cost of a large index.")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", default=str(HERE.parent / "build/million"), help="for the folders; kept")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Path(options.measure), options.workers)))
        return 0
    found = {}
    for count in (SMALL, options.files):
        began = time.perf_counter()
        folder = make(Path(options.root), count)
        print(f"{count:,} files: folder ready in {time.perf_counter() - began:.0f} s")
        command = [sys.executable, "-m", "benchmarks.million", "--measure", str(folder), "--workers"]
        output = subprocess.run([*command, str(options.workers)], check=True, stdout=subprocess.PIPE, text=True).stdout
        found[count] = json.loads(output.splitlines()[-1])
    small, large = found[SMALL], found[options.files]
    index = large["pss"][-1] - small["pss"][-1]
    growth = large["pss"][-1] / large["pss"][0] - 1
    print(f"listing {options.files:,} files: {large['listing']:.1f} s")
    print(f"from there to the first batch, {options.workers} workers started: {large['started']:.2f} s (reach: 3)")
    print(f"index, PSS over all processes after {EPOCHS} epochs: {index:.0f} MB (reach: 150)")
    print(f"growth of PSS from epoch 1 to {EPOCHS}: {growth:+.1%} (reach: 2 %); " + _row("all", large["pss"]))
    print(_row("private memory (USS) of the workers alone", large["workers_uss"]))
    return 0


def _row(title: str, values: list[float]) -> str:
    return f"{title}: " + ", ".join(f"{value:.0f} MB" for value in values)


if __name__ == "__main__":
    sys.exit(main())
