"""How many operations a step has: a model of very many small ones spends its time on starting them."""

from __future__ import annotations

from typing import Any

import torch

MOST = 100_000  # operations counted


def operations(loss: torch.Tensor) -> int:
    """Operations of the forward pass that have a gradient, from the graph behind the loss. About 1 us each, once."""
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left and len(seen) < MOST:
        node = left.pop()
        if node is None or node in seen or not node.next_functions:  # the last: where a parameter's gradient gathers
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return len(seen)
