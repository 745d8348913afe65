"""The gap between two epochs: `python -m benchmarks.gap [--photos FOLDER]` trains and reads the records of the run.

The network is a stand-in that takes a few milliseconds without using the processor, so the loader decides. The first
batch of an epoch, from the end of the pause for validation and checkpoint on, is compared with ordinary ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.run import HERE, TEMPLATE


def gaps(records: Path) -> tuple[list[float], float]:
    """Seconds of the first batch of each epoch but the first one, and the median of all others."""
    first, others, epoch = [], [], 0
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["epoch"] != epoch:
            epoch = record["epoch"]
            first.append(record["wall"])
        else:
            others.append(record["wall"])
    return first, statistics.median(others)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gap", description="The gap between two epochs.")
    parser.add_argument("--photos", default=str(HERE.parent / "build/photos/small"))
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.dir={folder}/run",
            f"data.path={options.photos}",
            "data.image_size=224",
            "data.crop_scale=[0.08,1]",
            "data.drop_last=true",  # a shorter last batch would lower the median
            "model.name=stand_in",
            f"model.stand_in_ms={options.step_ms}",
            f"train.epochs={options.epochs}",
        ]
        subprocess.run([sys.executable, TEMPLATE / "train.py", *settings], check=True, stdout=subprocess.DEVNULL)
        first, ordinary = gaps(Path(folder) / "run" / "rank0.jsonl")
    shown = ", ".join(f"{seconds * 1e3:.1f}" for seconds in first)
    print(f"first batch of an epoch: {shown} ms; an ordinary batch: {ordinary * 1e3:.1f} ms (median)")
    print(f"gap: {max(first) / ordinary:.2f} ordinary batch intervals at most (reach: 1)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
