"""Where random numbers come from.

Every draw of a training is a function of (seed, place): a sample's augmentation of (seed, epoch, index), a step's
dropout of (seed, epoch, batch, rank), any other draw for a batch in a worker of (seed, epoch, rank, batch). So
the result depends neither on the number of workers nor on what was drawn before, and a resumed run needs no saved
random states.

Python's, NumPy's and torch's global generators are set, since that is what transforms draw from. It costs about 8 us
for the three together.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

# One number a kind of draw, so that no two kinds share a stream.
ORDER, SAMPLE, BATCH, WORKER, STEP, WEIGHTS, REPLACEMENT = range(1, 8)

_MASK = (1 << 64) - 1
_PYTHONS: Any = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the functions of `random`


def mix(*parts: int, start: int = 0) -> int:
    """One 64-bit number from several: SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom generators).

    ``mix(a, b, c)`` is ``mix(c, start=mix(a, b))``: what many numbers begin with needs to be mixed only once.
    """
    z = start
    for part in parts:
        z = (z + part + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z


def seed_all(*parts: int, start: int = 0, device: torch.device | None = None) -> None:
    """Set Python's, NumPy's and torch's global generators from ``mix(*parts)``.

    CUDA's, too, where CUDA is in use; Apple's if that is the `device`, since it would begin to be used by being asked.
    """
    value = mix(*parts, start=start)
    super(random.Random, _PYTHONS).seed(value)  # what random.seed(value) does, without looking at the kind of value
    _PYTHONS.gauss_next = None
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)  # this process's device only; no sync
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(value)


def permutation(size: int, *parts: int) -> np.ndarray:
    """A random order of ``range(size)``, int64, the same for the same parts on every rank and machine."""
    generator = torch.Generator().manual_seed(mix(*parts))
    return torch.randperm(size, generator=generator).numpy()
