"""From a plain model to one that trains on this device with the other ranks, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fasttrain.errors import SettingsError


def wrap(
    model: nn.Module, device: torch.device, *, channels_last: bool, sync_batchnorm: bool, compile_model: bool
) -> nn.Module:
    """Move the model to the device and, where there are several ranks, into DistributedDataParallel.

    DDP's broadcast of buffers before each forward pass is off: batch-norm statistics take no part in training, so
    they are made equal when they are used, before validation and saving (`share_buffers`), not in every step.
    """
    model = model.to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    several = dist.is_initialized() and dist.get_world_size() > 1
    if sync_batchnorm:
        if device.type != "cuda":
            raise SettingsError("model.sync_batchnorm", True, f"false on {device.type}: PyTorch has it for CUDA only")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if several else model
    if compile_model:
        model.compile()  # in place: the names of the parameters stay as they are
    if not several:
        return model
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False  # not as an argument, which newer releases of PyTorch warn of
    return wrapped


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """The user's model in evaluation mode; then each of its parts as it was before, so that a frozen one stays so."""
    plain = unwrap(model)
    modes = [(part, part.training) for part in plain.modules()]
    plain.eval()
    try:
        yield plain
    finally:
        for part, training in modes:
            part.training = training


def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0 (batch-norm statistics). Every rank must call it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in unwrap(model).buffers():
            dist.broadcast(buffer, src=0)
