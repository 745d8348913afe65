"""Which number format the forward pass computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


def choose(amp: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype for a setting of ``amp``; None computes in float32.

    auto is bfloat16 where the device has it in hardware, else float16 on CUDA (with a gradient scaler), else float32.
    """
    if amp == "auto":
        return native(device)
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[amp]


def native(device: torch.device) -> torch.dtype | None:
    """The half-width format that this device multiplies matrices in."""
    if device.type == "cuda":
        if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
            return torch.bfloat16
        return torch.float16
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16(Path("/proc/cpuinfo")) else None
    return None  # MPS: autocast gains little and some operations lack it


def cpu_has_bfloat16(cpuinfo: Path) -> bool:
    """Whether the CPU has bfloat16 dot products (AVX512-BF16, AMX, Arm's BF16); emulated it is slower than float32."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False  # not Linux
    flags = {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The context of a forward pass in this format, to be entered as often as wanted; None computes in float32.

    Making an autocast costs more than entering it, and an autocast that is switched off as much as one that isn't.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
