"""Copying ahead: the next batch's copy is under way before this one is handed over, and memory is kept while in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from fasttrain.clock import HostClock
from fasttrain.transfer import Batch, CudaStreams, ahead, leaves, move, plain, to_device


class Log:
    """Plays a device's streams and writes down what is asked of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def copy(self, tensors: Any) -> tuple[Any, float, float]:
        self.lines.append(f"copy {tensors[0]}")
        return (tensors[0] + 100,), float(tensors[0]), float(tensors[0]) + 0.5

    def hand_over(self, tensors: Any, copied: float) -> None:
        self.lines.append(f"hand over {tensors[0]} after {copied}")

    def wait(self, copied: float) -> None:
        self.lines.append(f"wait {copied}")


def batch(number: int) -> Batch:
    return Batch((number,), [number], 0, number, 9, 0, 0.0, None)


def test_the_next_copy_starts_before_a_batch_is_used() -> None:
    log = Log()
    for got in ahead([batch(0), batch(1), batch(2)], log):
        log.lines.append(f"use {got.tensors[0]} copied {got.copied}")
    assert log.lines == [
        "copy 0",
        "copy 1",
        "hand over 100 after 0.5",
        "use 100 copied (0.0, 0.5)",
        "wait 0.5",  # before 2 is asked for, which may take the slot of 0
        "copy 2",
        "hand over 101 after 1.5",
        "use 101 copied (1.0, 1.5)",
        "wait 1.5",
        "hand over 102 after 2.5",
        "use 102 copied (2.0, 2.5)",
        "wait 2.5",
    ]


def test_no_batches_no_copies() -> None:
    log = Log()
    assert list(ahead([], log)) == []
    assert log.lines == []


def test_on_a_cpu_a_batch_stays_where_it_is() -> None:
    one = batch(0)
    one.tensors = (torch.ones(3),)
    before = one.tensors[0].data_ptr()
    (got,) = to_device([one], torch.device("cpu"), HostClock())
    assert got.tensors[0].data_ptr() == before
    assert got.copied is None


def test_a_plain_copy_is_timed() -> None:
    one = batch(0)
    one.tensors = (torch.ones(3),)
    (got,) = plain([one], torch.device("meta"), HostClock())
    assert got.tensors[0].device.type == "meta"
    assert got.copied is not None
    assert got.copied[1] >= got.copied[0]


def test_nested_tensors_are_moved_and_found() -> None:
    nested = {"a": torch.ones(1), "b": (torch.ones(2), [torch.ones(3), 5])}
    moved = move(nested, torch.device("meta"))
    assert [t.device.type for t in leaves(moved)] == ["meta"] * 3
    assert moved["b"][1][1] == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_overlap_with_compute_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    host = [torch.empty(64 << 20, dtype=torch.uint8).pin_memory() for _ in range(4)]
    work = torch.randn(4096, 4096, device=device)

    def batches() -> Iterator[Batch]:
        for number, tensor in enumerate(host):
            one = batch(number)
            one.tensors = (tensor,)
            yield one

    spans = []
    for got in to_device(batches(), device, HostClock(), CudaStreams(device)):
        end = torch.cuda.Event(enable_timing=True)
        for _ in range(20):
            work = work @ work * 1e-3
        end.record()
        spans.append((got.copied, end))
    torch.cuda.synchronize()
    for (_, end), _, (copied, _) in zip(spans, spans[1:], spans[2:], strict=False):
        assert copied is not None
        assert copied[0].elapsed_time(end) > 0, "a copy began only after the compute before the last had ended"


def test_a_named_tuple_stays_one() -> None:
    class Pair(NamedTuple):
        image: torch.Tensor
        label: int

    moved = move(Pair(torch.ones(1), 2), torch.device("meta"))
    assert (type(moved), moved.image.device.type, moved.label) == (Pair, "meta", 2)
