"""Under torchrun, for ``doctor``: join the other processes, sum a number with them, and write down how long that took.

torchrun ... -m fasttrain.tools.rendezvous FILE
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fasttrain.device import pick_device


def main() -> None:
    device = pick_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    began = time.perf_counter()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=60))
    number = torch.ones(1, device=device)
    dist.all_reduce(number)
    if int(number) != dist.get_world_size():
        raise RuntimeError(f"{dist.get_world_size()} processes summed up to {int(number)}")
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(str(time.perf_counter() - began))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
