"""What stands in the tables: which competitors meet on which data, and what the project set out to reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A competitor: its module in benchmarks/peers, its name in the table, and the ratio to reach against it.

    Attributes:
        reach: the project's images a second over this one's should be at least that; None: nothing was set.
        data_of: whose converted data it takes; None: its own.
    """

    peer: str
    title: str
    reach: float | None = None
    data_of: str | None = None


@dataclass(frozen=True)
class Group:
    """One table. photos: small or camera; kind: folder, raw or jpeg, see `work.Work`."""

    name: str
    title: str
    photos: str
    kind: str
    rows: tuple[Row, ...]


PROJECT = Row("project", "this project")


def _folder(name: str, size: str, tuned: float) -> Group:
    rows = (
        PROJECT,
        Row("torchvision", "torchvision, DataLoader as it comes (0 workers)", 1.1),
        Row("torchvision_tuned", "torchvision, DataLoader tuned", tuned),
        Row("timm", "timm create_loader", 1.1),
        Row("webdataset", "WebDataset", 1.1),
        Row("litdata", "LitData", 1.1),
        Row("dali", "DALI, CPU", 1.1),
        Row("spdl", "SPDL with our decode function", 0.97),
        Row("nodes", "torchdata.nodes with our decode function", 0.97),
        Row("limit", "the function alone, times workers", 0.9, "project"),
    )
    return Group(name, f"JPEG files as they are, {size}", name, "folder", rows)


GROUPS = (
    _folder("small", "500x375", 5.0),
    _folder("camera", "1600x1066", 3.8),
    Group(
        "raw",
        "packed: raw pixels, 256x256",
        "small",
        "raw",
        (
            PROJECT,
            Row("ffcv", "FFCV, raw", 2.5),
            Row("stock_lmdb", "stock DataLoader over the same LMDB", 3.0, "project"),
            Row("limit", "the function alone, times workers", 0.7, "project"),
        ),
    ),
    Group(
        "jpeg",
        "packed: JPEG, 256x256, quality 95",
        "small",
        "jpeg",
        (
            PROJECT,
            Row("ffcv", "FFCV, JPEG", 1.0),
            Row("stock_lmdb", "stock DataLoader over the same LMDB", None, "project"),
            Row("limit", "the function alone, times workers", 0.9, "project"),
        ),
    ),
)
