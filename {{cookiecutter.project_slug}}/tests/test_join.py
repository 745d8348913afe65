"""Ranks that meet in a store which an earlier start has used."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from fasttrain.errors import UserError
from fasttrain.join import agree_on_name, reach


@pytest.fixture
def store() -> Any:
    stores: Any = dist  # which exports it, unknown to type checkers
    return stores.HashStore()


def test_each_start_has_a_name_of_its_own_that_all_ranks_know(store: Any) -> None:
    """The ranks of the second start come in any order, and find the calls and answers of the first."""
    names = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        with ThreadPoolExecutor(3) as pool:
            met = [pool.submit(agree_on_name, store, rank, 3, 20.0) for rank in order]
            (name,) = {each.result() for each in met}
        names.append(name)
    assert len(set(names)) == 3


def test_a_launcher_that_is_gone_is_noticed_at_once() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"the launcher does not answer at 127.0.0.1:{port}"):
            reach("127.0.0.1", port, 0.1)
        server.listen()
        reach("127.0.0.1", port, 0.1)


def test_a_rank_that_does_not_come_is_named(store: Any) -> None:
    with pytest.raises(UserError, match=r"rank 1, 2 did not come within 0\.1 s \(run\.timeout\)"):
        agree_on_name(store, 0, 3, 0.1)
    with pytest.raises(UserError, match="rank 0 did not answer"):
        agree_on_name(store, 1, 3, 0.1)
