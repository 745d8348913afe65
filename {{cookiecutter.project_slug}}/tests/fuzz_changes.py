"""Random changes that the makers of hostile input (fuzz_*.py) share."""

from __future__ import annotations

import random
from typing import Any

import torch

NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 511, 512, 4095, 4096, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
NUMBERS += [2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -512, -(2**31), -(2**63)]


def changed(rng: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, set, removed, repeated, or the end cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        if not data:
            break
        at, length = rng.randrange(len(data)), rng.choice((1, 1, 2, 4, 8, 64))
        way = rng.randrange(7)
        if way == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif way == 2:
            number = rng.choice(NUMBERS) & (1 << 64) - 1
            size = rng.choice((2, 4, 8))
            data[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, rng.choice(("little", "big")))
        elif way == 3:
            del data[at : at + length]
        elif way == 4:
            data[at:at] = data[at : at + length]
        elif way == 5:
            other = rng.randrange(len(data))
            data[at : at + length] = data[other : other + length]
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def other(rng: random.Random, value: Any) -> Any:
    """Some value in it, or the name of one, replaced."""
    odd: list[Any] = [
        *NUMBERS,
        None,
        True,
        "",
        "x",
        "../../x",
        "\0",
        [],
        {},
        [[]],
        1.5,
        float("nan"),
        "9" * 5000,
        10**400,
    ]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        rest = {key: each for key, each in value.items() if key != name}
        return {**rest, rng.choice((name, name, "x", 7)): other(rng, value[name])}
    if isinstance(value, torch.Tensor) and rng.random() < 0.7:
        cast = value.to(rng.choice((torch.float16, torch.int64, torch.complex64, torch.bool)))
        return rng.choice((cast, value[None], value.to("meta"), value.to_sparse(), value * torch.nan))
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], other(rng, value[at]), *value[at + 1 :]]
    return rng.choice(odd)
