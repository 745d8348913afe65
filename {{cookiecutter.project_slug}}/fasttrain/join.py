"""How the processes of a training find one another: the launcher's variables, its store, the process group."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fasttrain.errors import UserError

TO_CONNECT = 15.0  # seconds to reach the launcher's store, which is there before this process


def launched() -> bool:
    """Whether a launcher started this process as one of several (or as a single one)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device: torch.device, timeout: float) -> Any:
    """Form the process group.

    Args:
        timeout: seconds that a process waits for another in it.

    Returns:
        a store that this start of the training has for itself.
    """
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=timeout)
    if by_torchrun:
        reach(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), TO_CONNECT)
    store, rank, world = next(rendezvous("env://", timeout=patience))
    own = PrefixStore(agree_on_name(store, rank, world, timeout), store)
    cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore("group", own),
        rank=rank,
        world_size=world,
        timeout=patience,
        device_id=device if cuda else None,
    )
    return own


def reach(host: str, port: int, seconds: float) -> None:
    """Connect once, since PyTorch would try for many minutes, and say a page about it.

    Raises:
        UserError: nobody answers there: the launcher was ended while this process started.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
            return
        except OSError as error:
            reason = error.strerror or error
        _wait(until, f"the launcher does not answer at {host}:{port} ({reason}): it is gone, or its machine")


def agree_on_name(store: Any, rank: int, world: int, timeout: float) -> str:
    """A name for this start, the same on all ranks and never used before.

    When torchrun restarts its processes the store stays, with all that the ones before have written: addresses of
    closed ports, who failed first. So each rank calls under a name of its own, and rank 0 answers under that name.

    Raises:
        UserError: not all ranks are there within the timeout.
    """
    until = time.monotonic() + timeout
    if rank > 0:
        call = uuid.uuid4().hex
        store.set(f"call {rank}", call)
        while not store.check([f"answer {call}"]):
            _wait(until, f"rank 0 did not answer within {timeout:g} s (run.timeout)")
        name = str(store.get(f"answer {call}").decode())
        store.set(f"{name} here {rank}", "1")
        return name
    name, missing, answered = uuid.uuid4().hex, set(range(1, world)), set()
    while missing:
        for other in sorted(missing):
            if store.check([f"{name} here {other}"]):
                missing.discard(other)
            elif store.check([f"call {other}"]) and (call := store.get(f"call {other}").decode()) not in answered:
                store.set(f"answer {call}", name)  # perhaps to a call of an earlier start: nobody hears it
                answered.add(call)
        if missing:
            ranks = ", ".join(map(str, sorted(missing)))
            _wait(until, f"rank {ranks} did not come within {timeout:g} s (run.timeout)")
    return name


def _wait(until: float, text: str) -> None:
    if time.monotonic() > until:
        raise UserError(text)
    time.sleep(0.01)
