"""Timers around what makes a sample: fasttrain's own steps, the owner's functions, and transforms of known libraries.

Each moment belongs to the innermost step that runs, so that steps add up to the whole.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch.utils.data import Dataset

from fasttrain import images, listing, packed, seeding, shards, slots, worker

REST = "everything else"
OWN: tuple[tuple[Any, str, str], ...] = (
    (images, "load", "read the file"),
    (listing.Listing, "content", "read the file"),
    (listing.Listing, "picture", "read the file"),
    (shards.Sharded, "content", "read from the shard"),
    (packed.Stored, "content", "read the store"),
    (packed.Stored, "picture", "read the store"),
    (images.Picture, "pixels", "decode"),
    (images, "crop", "crop and resize"),
    (images, "random_resized_crop", "draw the crop"),
    (images, "center", "draw the crop"),
    (images, "flip", "flip"),
    (packed, "read_picture", "read the store"),
    (slots.Slot, "put", "into the batch"),
    (worker.Stack, "put", "into the batch"),
    (seeding, "seed_all", "seeds"),
)
LIBRARIES = ("torchvision.transforms", "albumentations", "kornia.augmentation")
CALLS = ("__call__", "forward")


class Timers:
    """Seconds and calls of each step, for the thread that made it.

    Attributes:
        seconds, calls: by the step's name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._open: list[tuple[str, list[float]]] = []  # the steps that run, and the seconds of those within each
        self._thread = threading.get_ident()

    def wrap(self, function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
        """The same function, timed. Without a name it is called after the type of its first argument."""

        @functools.wraps(function)
        def timed(*args: Any, **more: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **more)
            step = name or type(args[0]).__name__
            if not self._open or self._open[-1][0] != step:  # a step may be made of functions that call each other
                self.calls[step] += 1
            self._open.append((step, []))
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                spent = time.perf_counter() - began
                self.seconds[step] += spent - sum(self._open.pop()[1])
                if self._open:
                    self._open[-1][1].append(spent)

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by the step's name."""
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken

    @contextmanager
    def around(self, dataset: Any, home: Path) -> Iterator[None]:
        """Everything that makes a sample of this data set is timed in here.

        Args:
            home: the project's folder; functions of modules in it, fasttrain's apart, are the owner's.
        """
        undo: list[tuple[Any, str, Any]] = []  # what is there afterwards; `_ABSENT` was not there itself
        timed: dict[int, Callable[..., Any]] = {}  # by the identity of the function

        def put(place: Any, key: str, function: Callable[..., Any], name: str | None) -> None:
            if id(function) not in timed:
                timed[id(function)] = self.wrap(function, name)
            undo.append((place, key, vars(place).get(key, _ABSENT)))
            setattr(place, key, timed[id(function)])

        own = _modules(home)
        try:
            for place, key, name in OWN:
                put(place, key, vars(place)[key], name)
            for place, key, name in [*_functions(own), *_attributes(dataset)]:
                put(place, key, vars(place)[key], name)
            for place, key in _library_calls():
                put(place, key, vars(place)[key], None)
            for module in own:  # functions that were imported by their names
                for key, value in list(vars(module).items()):
                    if id(value) in timed:
                        put(module, key, value, None)
            yield
        finally:
            for place, key, before in reversed(undo):
                if before is _ABSENT:
                    delattr(place, key)
                else:
                    setattr(place, key, before)


_ABSENT = object()


def _modules(home: Path) -> list[ModuleType]:
    """The owner's modules that are loaded."""
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not Path(file).is_relative_to(home):
            continue
        inside = Path(file).relative_to(home).parts
        foreign = inside[0] in ("fasttrain", "tests") or "site-packages" in inside
        if not foreign and not any(part.startswith(".") for part in inside):
            found.append(module)
    return found


def _functions(modules: list[ModuleType]) -> Iterator[tuple[Any, str, str]]:
    """Functions and methods that are written in these modules: where they stand, and their names."""
    for module in modules:
        file = Path(str(module.__file__)).name
        for key, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                yield module, key, f"{file}: {value.__qualname__}"
            elif isinstance(value, type):
                methods = [(name, each) for name, each in vars(value).items() if isinstance(each, FunctionType)]
                yield from ((value, name, f"{file}: {each.__qualname__}") for name, each in methods)


def _attributes(dataset: Any, depth: int = 3) -> Iterator[tuple[Any, str, str]]:
    """Functions that a data set, or one within it, keeps as attributes: a loader, a transform."""
    for key, value in list(getattr(dataset, "__dict__", {}).items()):
        if isinstance(value, FunctionType):
            yield dataset, key, f"{type(dataset).__name__}.{key}"
        elif isinstance(value, Dataset) and depth:
            yield from _attributes(value, depth - 1)


def _library_calls() -> Iterator[tuple[type, str]]:
    """What is called of each transform of the known libraries, as far as they are loaded."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(LIBRARIES):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and value not in seen and value.__module__.startswith(LIBRARIES):
                seen.add(value)
                yield from ((value, call) for call in CALLS if isinstance(vars(value).get(call), FunctionType))
