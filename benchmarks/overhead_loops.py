"""One loop of `overhead.py`, in a process of its own:  python overhead_loops.py PROJECT LOOP STEPS RESULT

All loops do the same arithmetic on the same batches in memory: uint8 images are normalised by the project's
`data.Prepare`, a tiny network, cross entropy, the project's fused SGD. None reads the loss. The batches come from one
`Source`, which notes when each was asked for: a step is the time from one request to the next, whatever the loop does
between them. RESULT is a file; it gets the times as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

BATCH, PIXELS, CLASSES = 64, 8, 10
IN_MEMORY = 32  # batches, each used again and again
WARM_UP = 500  # steps that are not counted

Loop = Callable[["Bench"], None]


class Source:
    """Hands out a number of batches, and notes the moment of each request."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches, self.steps = batches, steps
        self.asked: list[float] = []
        self.busy: list[float] = []  # process CPU time at the first and the last counted step

    def __len__(self) -> int:
        return WARM_UP + self.steps + 1  # the last one's request ends the step before it

    def __iter__(self) -> Iterator[Any]:
        batches, asked = self.batches, self.asked
        for number in range(len(self)):
            if number in (WARM_UP, WARM_UP + self.steps):
                self.busy.append(time.process_time())
            asked.append(time.perf_counter())
            yield batches[number % IN_MEMORY]

    def result(self) -> dict[str, float]:
        """Microseconds a step: mean and median of the wall time, and the processor time of all threads."""
        times = self.asked[WARM_UP:]
        steps = sorted(after - before for before, after in itertools.pairwise(times))
        return {
            "mean": (times[-1] - times[0]) / self.steps * 1e6,
            "median": steps[len(steps) // 2] * 1e6,
            "cpu": (self.busy[1] - self.busy[0]) / self.steps * 1e6,
        }


class Bench:
    """What every loop gets."""

    def __init__(self, steps: int, directory: Path) -> None:
        import torch

        torch.set_num_threads(1)
        self.directory = directory
        generator = torch.Generator().manual_seed(0)
        shape = (BATCH, PIXELS, PIXELS, 3)
        images = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(IN_MEMORY)]
        labels = [torch.randint(0, CLASSES, (BATCH,), generator=generator) for _ in range(IN_MEMORY)]
        self.source = Source(list(zip(images, labels, strict=True)), steps)
        self.settings = [
            *(
                "amp=off",
                "train.epochs=1",
                "data.workers=0",
                "checkpoint.every_minutes=1000",
                f"data.image_size={PIXELS}",
            ),
            *("model.channels_last=false", f"data.batch_size={BATCH}", f"run.dir={directory}"),
        ]

    def network(self) -> Any:
        from torch import nn

        width = 3 * PIXELS * PIXELS
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def parts(self) -> tuple[Any, Any, Any, Callable[[Any, Any], Any]]:
        """Network, optimizer, preparation of a batch, loss: the project's own."""
        import torch

        data, model, train, update = map(import_module, ("data", "model", "train", "fasttrain.update"))
        cfg, _ = train.settings.load(train.Config, train.HERE / "config.yaml", self.settings)
        net = self.network()
        prepare = data.Prepare(cfg.data, CLASSES, torch.device("cpu"))
        return (
            net,
            update.build_optimizer(net, cfg.optimizer),
            prepare,
            lambda logits, y: model.compute_loss(logits, y, 0.0),
        )


def bare(bench: Bench) -> None:
    net, optimizer, prepare, compute_loss = bench.parts()
    for batch in bench.source:
        images, labels = prepare(*batch, training=True)
        loss = compute_loss(net(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(bench: Bench, *on: str, log: bool = False) -> None:
    """The project's own train.py from its settings to its last checkpoint, with these parts of its watching.

    Its loader is left out, as that of every other loop: batches lie in slots already. All that the training thread does
    with a batch of the loader is done.
    """
    train = import_module("train")
    with contextlib.ExitStack() as stack:
        _in_memory(bench, stack)
        _only(set(on), stack)
        if log:
            _log_each_step(stack)
        sys.argv[1:] = bench.settings
        train.main()


def _patch(stack: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    stack.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _in_memory(bench: Bench, stack: contextlib.ExitStack) -> None:
    """The project on the batches in memory and the tiny network."""
    import torch

    data, model, train, slots = map(import_module, ("data", "model", "train", "fasttrain.slots"))
    batch_of = import_module("fasttrain.transfer").Batch

    class Samples:
        def __len__(self) -> int:
            return len(bench.source) * BATCH

    class Val(Samples):
        def __len__(self) -> int:
            return 1

    feed: Any = train.Feed

    class InMemory(feed):  # type: ignore[misc]
        def _open(self, epoch: int, start: int) -> Iterator[Any]:
            self.workers, own = 1, self.train_samples  # as if one had made them: what it takes to tell is done, too
            first = bench.source.batches[0]
            fields = slots.fields_of(tuple(item[0] for item in first))
            own.slots = slots.Slots(fields, BATCH, 1, IN_MEMORY - slots.SPARE)
            for number, batch in enumerate(bench.source.batches):
                for place, item in zip(own.slots.tensors(0, number, BATCH), batch, strict=True):
                    place.copy_(item)
            return self._stored(len(bench.source))

        def _stored(self, count: int) -> Iterator[Any]:
            indices = list(range(BATCH))
            for number, _ in enumerate(bench.source):
                self._made[0] += 1
                end = (number + 1) * BATCH
                yield batch_of(None, indices, 0, number, count - 1, end, 1e-4, 0, slot=number % IN_MEMORY)

        def validation(self) -> Iterator[Any]:
            return iter((batch_of(bench.source.batches[0], [0], 0, 0, 0, 0, 0.0, None),))

    def build(*_: Any) -> Any:
        torch.set_num_threads(1)
        return data.Datasets(Samples(), Val(), [str(number) for number in range(CLASSES)])

    _patch(stack, data, "build", build)
    _patch(stack, model, "build_model", lambda *_: bench.network())
    _patch(stack, train, "Feed", InMemory)


class Off:
    """Stands in for a part that is switched off."""

    sink = property(lambda self: self)
    latest = None
    lost = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def batches(self, source: Any) -> Any:
        return source

    def pause(self, name: str) -> Any:
        return contextlib.nullcontext()

    def __enter__(self) -> Off:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    def verdict(self, *_: Any) -> Off:
        return self

    def lines(self) -> list[str]:
        return []

    mark = note = close = abandon = event = batch = show_on = draw = _nothing


PARTS = (
    ("watch", "Watch"),
    ("recorder", "Recorder"),
    ("looks", "Looks"),
    ("gauges", "Gauges"),
    ("verdict", "LiveVerdict"),
)  # names of observe.py


def _only(on: set[str], stack: contextlib.ExitStack) -> None:
    observe = import_module("fasttrain.observe")
    for name, part in PARTS:
        if name not in on:
            _patch(stack, observe, part, Off)
    if "dashboard" not in on:
        _patch(stack, observe.Report, "_show_dashboard", lambda *_: None)


def _log_each_step(stack: contextlib.ExitStack) -> None:
    from loguru import logger

    train = import_module("train")
    line, advance = logger.bind(only="file"), train.State.advance

    def logging(self: Any, batch: Any) -> None:
        advance(self, batch)
        line.info("batch {} of epoch {} is done", batch.number, batch.epoch)

    _patch(stack, train.State, "advance", logging)


# ---- the others ------------------------------------------------------------------------------------------------------


def lightning(bench: Bench, as_it_comes: bool) -> None:
    """Its automatic optimization. As it comes: progress bar, logger and checkpoint at their defaults, loss logged."""
    pl = import_module("lightning.pytorch")
    net, optimizer, prepare, compute_loss = bench.parts()

    base: Any = pl.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, number: int) -> Any:
            images, labels = prepare(*batch, training=True)
            loss = compute_loss(self.net(images), labels)
            if as_it_comes:
                self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    more: dict[str, Any] = (
        {}
        if as_it_comes
        else dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    )
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=bench.directory, **more)
    trainer.fit(Module(), bench.source)


def accelerate(bench: Bench) -> None:
    """The loop of its quick tour."""
    net, optimizer, prepare, compute_loss = bench.parts()
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    for batch in bench.source:
        images, labels = prepare(*batch, training=True)
        loss = compute_loss(net(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def traceml(bench: Bench) -> None:
    """The loop of its quick start; the process is started by `traceml run`."""
    traceml_ai = import_module("traceml_ai")
    net, optimizer, prepare, compute_loss = bench.parts()
    traceml_ai.init(mode="auto")
    for batch in bench.source:
        with traceml_ai.trace_step(net):
            images, labels = prepare(*batch, training=True)
            loss = compute_loss(net(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


ALL = ("watch", "recorder", "looks", "gauges", "verdict", "dashboard")
LOOPS: dict[str, Loop] = {
    "bare": bare,
    "loop": lambda bench: ours(bench),
    "watch": lambda bench: ours(bench, *ALL[:1]),
    "recorder": lambda bench: ours(bench, *ALL[:2]),
    "looks": lambda bench: ours(bench, *ALL[:3]),
    "gauges": lambda bench: ours(bench, *ALL[:4]),
    "verdict": lambda bench: ours(bench, *ALL[:5]),
    "ours": lambda bench: ours(bench, *ALL),
    "log": lambda bench: ours(bench, *ALL, log=True),
    "accelerate": accelerate,
    "traceml": traceml,
    "lightning-off": lambda bench: lightning(bench, as_it_comes=False),
    "lightning": lambda bench: lightning(bench, as_it_comes=True),
}


def main() -> None:
    project, name, steps, result = sys.argv[1:]
    sys.path.insert(0, project)
    bench = Bench(int(steps), Path(result).with_suffix(".run"))
    LOOPS[name](bench)
    Path(result).write_text(json.dumps(bench.source.result()))


if __name__ == "__main__":
    main()
