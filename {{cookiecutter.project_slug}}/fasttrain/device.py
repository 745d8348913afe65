"""The device that a process computes on, and how many threads it may take there."""

from __future__ import annotations

import os

import torch

from fasttrain import machine
from fasttrain.errors import UserError


def pick_device(local_rank: int, local_world: int) -> torch.device:
    """The device of this process: its CUDA (or ROCm) device, Apple's, or the CPU."""
    if torch.cuda.is_available():  # NVIDIA, and AMD through ROCm
        count = torch.cuda.device_count()
        if local_world > count:
            raise UserError(f"{local_world} processes on this machine but {count} GPUs: --nproc-per-node={count}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # shapes stay the same: the fastest algorithm is looked for once
        return device
    if torch.backends.mps.is_available() and local_world == 1:
        return torch.device("mps")
    return torch.device("cpu")


def set_threads(device: torch.device, threads: int | None, local_world: int) -> None:
    """Set PyTorch's threads: as asked, or as OMP_NUM_THREADS was, or the cores shared by this machine's processes."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif device.type == "cpu" and not _chosen_threads():
        torch.set_num_threads(max(1, machine.cores() // local_world))


def _chosen_threads() -> bool:
    """Whether OMP_NUM_THREADS was set by somebody. torchrun sets it to 1, whatever the machine has."""
    unset = {None, "1"} if "TORCHELASTIC_RUN_ID" in os.environ else {None}
    return os.environ.get("OMP_NUM_THREADS") not in unset
