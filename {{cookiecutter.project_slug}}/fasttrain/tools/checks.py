"""What ``doctor`` judges: each check takes readings and gives one line. Pure: the readings come from doctor.py."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from fasttrain.tools.footprint import PART, Machine, Need

OK, WARNING, ERROR = "ok", "warning", "error"
FEWEST_FILES, FILES = 256, 1024  # open files: with fewer a training fails, or may with many workers
NCCL_SHARED = 64e6  # bytes of /dev/shm that NCCL wants
SLOW_DISK = 50e6  # bytes a second
FEW_SAMPLES = 2000  # a second
UNEVEN = 20.0  # times as many images in the largest class as in the smallest
SAVES = 4  # checkpoints on disk at once: best, last, the one before it, and the one being written
SLOW_START = 30.0  # seconds until processes have found each other


class Check(NamedTuple):
    """One line: ok, warning or error; what was found; what to do (empty: nothing)."""

    status: str
    text: str
    remedy: str = ""


def mb(size: float) -> str:
    """A size for people."""
    if size < 1e6:
        return f"{size / 1e3:,.0f} KB"
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def device(kind: str, names: Sequence[str], torch_version: str, processes: int, driver: str | None) -> Check:
    """kind: cuda, mps or cpu. names: of the GPUs that PyTorch sees. driver: of NVIDIA, if NVML tells it."""
    if kind == "cpu" and driver is not None:
        return Check(
            ERROR,
            f"an NVIDIA driver ({driver}) is here, but PyTorch {torch_version} sees no GPU",
            "install PyTorch's CUDA build, or look at CUDA_VISIBLE_DEVICES",
        )
    if kind == "cpu":
        return Check(OK, f"no GPU: PyTorch {torch_version} trains on the CPU")
    if kind == "cuda" and processes > len(names):
        remedy = f"torchrun --nproc-per-node={len(names)}"
        return Check(ERROR, f"{processes} processes, but {len(names)} GPUs", remedy)
    shown = ", ".join(sorted(set(names))) or kind
    idle = len(names) - processes
    text = f"{max(len(names), 1)} x {shown}, PyTorch {torch_version}" + (f", driver {driver}" if driver else "")
    if idle > 0:
        return Check(WARNING, f"{text}; {idle} would be idle", f"torchrun --nproc-per-node={len(names)}")
    return Check(OK, text)


def nvml(needed: bool, error: str | None) -> Check:
    """error: why the GPU can't be watched."""
    if not needed:
        return Check(OK, "not needed: no NVIDIA GPU")
    if error is None:
        return Check(OK, "utilisation, memory, temperature and power can be read")
    return Check(
        WARNING, f"the GPU can't be watched: {error}", "training works; pip install nvidia-ml-py, or the driver"
    )


def cores(machine_cores: int, usable: int, quota: float | None, processes: int, workers: int) -> Check:
    """usable: after affinity and quota, for all processes together."""
    limits = f"{usable} of {machine_cores} cores may be used" + ("" if quota is None else f", by a quota of {quota:g}")
    wanted = processes * workers
    if wanted > 1.5 * usable:
        most = max(1, usable // processes)
        text = f"{limits}; {processes} x {workers} loader workers share them"
        return Check(WARNING, text, f"data.workers: {workers} -> {most}, or python -m fasttrain tune")
    if processes > usable:
        return Check(WARNING, f"{limits}, for {processes} processes", f"torchrun --nproc-per-node={usable}")
    return Check(OK, f"{limits}; {processes} x {workers} loader workers")


def memory(need: Need, trainers: float, free: int) -> Check:
    """trainers: bytes of the training processes themselves."""
    wanted = need.memory + trainers
    text = f"about {mb(wanted)} needed, {mb(free)} free"
    if wanted > free:
        return Check(ERROR, text, "lower data.workers, data.prefetch_factor or data.batch_size, or raise the limit")
    if wanted > PART * free:
        return Check(
            WARNING, f"{text}: little is left for the page cache", "lower data.workers or data.prefetch_factor"
        )
    return Check(OK, text)


def shared_memory(need: Need, machine: Machine, several_gpus: bool, size: int | None) -> Check:
    """size: free bytes of /dev/shm; None where there is none."""
    if size is None:
        return Check(OK, "this system has no /dev/shm")
    wanted = (need.shared if machine.shared is not None else 0) + (NCCL_SHARED if several_gpus else 0)
    text = f"{mb(wanted)} needed in /dev/shm, {mb(size)} free" if wanted else f"/dev/shm is not needed; {mb(size)} free"
    if wanted > size:
        return Check(ERROR, text, "docker run --shm-size=8g (or --ipc=host); or lower data.workers")
    return Check(OK, text)


def open_files(limit: int | None, workers: int) -> Check:
    """limit: of this shell; None where there is none."""
    if limit is None:
        return Check(OK, "no limit")
    wanted = FEWEST_FILES + 16 * workers
    text = f"{limit:,} allowed, about {wanted} needed by each training process"
    if limit < wanted:
        return Check(ERROR, text, "ulimit -n 65536")
    return Check(WARNING, text, "ulimit -n 65536") if limit < FILES else Check(OK, text)


def disk(speed: float | None, mean_size: float | None) -> Check:
    """speed: bytes a second of reading data, past the page cache. mean_size: bytes of a sample."""
    if speed is None:
        return Check(OK, "not measured: the data lie in memory, or data.py has no files to read")
    supply = f", {speed / mean_size:,.0f} samples a second of {mb(mean_size)}" if mean_size else ""
    text = f"{mb(speed)}/s when read for the first time{supply}"
    remedy = "python -m fasttrain pack makes it smaller; copy the data to a local disk; data.warm=true for a store"
    # Of small files no disk gives many bytes a second: they are slow only if they are also few.
    slow = speed < SLOW_DISK and (mean_size is None or speed / mean_size < FEW_SAMPLES)
    return Check(WARNING, text, remedy) if slow else Check(OK, text)


def checkpoints(size: float, free: int, where: str) -> Check:
    """size: bytes of one checkpoint. free: of the disk at `where`."""
    text = f"{SAVES} checkpoints of about {mb(size)}, {mb(free)} free in {where}"
    if SAVES * size > free:
        return Check(ERROR, text, "free some space, or set run.dir to another disk")
    return (
        Check(WARNING, text, "free some space: logs and records come on top")
        if free < 5 * SAVES * size
        else Check(OK, text)
    )


def rendezvous(processes: int, backend: str, seconds: float | None, error: str | None) -> Check:
    """seconds until the processes have summed a number together; None if they didn't."""
    if seconds is None:
        remedy = "look at MASTER_ADDR, the firewall, and the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        return Check(ERROR, f"{processes} processes over {backend} don't find each other: {error}", remedy)
    text = f"{processes} processes over {backend} found each other in {seconds:.1f} s"
    slow = "name resolution may be slow: does `hostname` resolve?"
    return Check(WARNING, text, slow) if seconds > SLOW_START else Check(OK, text)


def classes(counts: Sequence[int], names: Sequence[str]) -> Check:
    """counts: training images of each class."""
    if not counts or min(counts) == max(counts):
        return Check(OK, f"{len(counts)} classes of {counts[0]:,} training images each" if counts else "not known")
    few, many = min(range(len(counts)), key=counts.__getitem__), max(range(len(counts)), key=counts.__getitem__)
    text = f"{len(counts)} classes, from {counts[few]:,} ({names[few]}) to {counts[many]:,} ({names[many]}) images"
    if counts[few] == 0:
        return Check(WARNING, text, f"give {names[few]} training images, or remove its folder")
    if counts[many] > UNEVEN * counts[few]:
        remedy = "accuracy will hide the small classes: look at them apart, or draw them more often in data.py"
        return Check(WARNING, text, remedy)
    return Check(OK, text)


def batches(train: int, val: int, batch: int, processes: int, drop_last: bool) -> Check:
    """The batches of an epoch on each rank, and what is left over."""
    each = train // processes if drop_last else -(-train // processes)
    full, rest = divmod(each, batch)
    text = f"{train:,} training and {val:,} validation samples: {full} batches of {batch} a process"
    if drop_last:
        left = train - full * batch * processes
        if not full:
            return Check(
                ERROR, f"{text}: not one", f"data.batch_size: {batch} -> {max(1, each)}, or data.drop_last=false"
            )
        return Check(OK, f"{text}; {left} samples are left out each epoch")
    if rest == 1 and full:
        remedy = "data.drop_last=true: batch norm can't learn from one sample"
        return Check(WARNING, f"{text}, and a last one of 1 sample", remedy)
    repeated = each * processes - train
    more = f", and a last one of {rest}" * bool(rest) + f"; {repeated} samples are taken twice" * bool(repeated)
    return Check(OK, text + more)


def start_method(method: str, system: str, dataset: Any, workers: int) -> Check:
    """method: fork, spawn or forkserver, resolved. system: as ``sys.platform``."""
    if not workers:
        return Check(OK, "no loader workers are started")
    if method == "fork":
        if system == "darwin":
            remedy = "data.start_method=spawn: macOS's own libraries crash in forked processes"
            return Check(WARNING, "workers are forked on macOS", remedy)
        return Check(OK, "workers are forked: they start at once and share memory")
    try:
        size = len(pickle.dumps(dataset))
    except Exception as error:  # whatever the owner's data set holds
        reason = f"the data set can't be sent to workers started by {method}: {error}"
        return Check(ERROR, reason, "keep open files, lambdas and locks out of it; or data.start_method=fork")
    text = f"workers are started by {method}, which takes seconds; each gets {mb(size)} of data set"
    if size > 100e6:
        return Check(WARNING, text, "keep arrays in files that each worker opens, or data.start_method=fork")
    return Check(OK, text)
