"""Faults to plant in a training, and healthy trainings to leave alone: what the owner of the project would have done.

Each is a set of settings and a few lines in a copy of data.py, model.py or train.py; fasttrain/ stays as it is. The
device is played by `model.name=stand_in`, which takes 50 ms a step and no core.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BASE = (
    "model.name=stand_in",
    "model.stand_in_ms=50",
    "data.image_size=32",
    "data.batch_size=8",
    "data.workers=2",
    "data.prefetch_factor=4",
    "train.epochs=1000",
    "optimizer.warmup_steps=0",
    "optimizer.lr=0.001",
    "amp=off",
)
END = "# ---- the training ---"  # in train.py: behind what a training is made of


@dataclass(frozen=True)
class Plant:
    """One kind of run. `steps` at its usual speed are the 6 to 8 seconds that a judgement takes."""

    expect: str | None  # the cause that has to come first; None: healthy
    steps: int
    settings: tuple[str, ...] = ()
    data: str = ""  # lines behind data.py
    model: str = ""
    train: Mapping[str, str] = field(default_factory=dict)  # what is replaced in train.py
    processes: int = 1
    cores: float | None = None  # CPU quota
    short_epochs: bool = False
    rank: int | None = None  # the rank that has to be named

    def write(self, home: Path, target: Path) -> Path:
        """Copy the project and plant the fault."""
        ignored = shutil.ignore_patterns("tests", "data", "runs", "__pycache__", ".*", "*.egg-info")
        shutil.copytree(home, target, ignore=ignored)
        for name, lines in (("data.py", TOOLS + self.data if self.data else ""), ("model.py", self.model)):
            with (target / name).open("a") as file:
                file.write(lines)
        text = (target / "train.py").read_text()
        for before, after in self.train.items():
            if text.count(before) != 1:
                raise ValueError(f"train.py holds {before!r} {text.count(before)} times, expected once")
            text = text.replace(before, after)
        (target / "train.py").write_text(text)
        return target


TOOLS = """

import builtins, os, time
from torch.utils.data import get_worker_info
_plain = Images.unfinished

def work(seconds, blur=np.zeros((200, 200, 3), np.uint8)):
    \"\"\"Computes for so many seconds of a core.\"\"\"
    import cv2
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        cv2.GaussianBlur(blur, (5, 5), 1.0)

"""


def each_sample(*lines: str, where: str = "self.train") -> str:
    """Lines that run for each training sample, in the data set."""
    body = "".join(f"        {line}\n" for line in lines)
    return f"""
def _slowed(self, index):
    if {where}:
{body}    return _plain(self, index)

Images.unfinished = _slowed
"""


def beside(*lines: str) -> dict[str, str]:
    """Lines behind the optimizer step in train.py's loop."""
    anchor = "            state.advance(batch)\n"
    return {anchor: anchor + "".join(f"            {line}\n" for line in lines)}


def before_training(lines: str) -> dict[str, str]:
    """Lines in front of the function train()."""
    return {END: f"{lines}\n\n{END}"}


THROTTLED_FILES = """
class Throttled:
    \"\"\"A file on a disk that gives 125 KB a second.\"\"\"

    def __init__(self, *arguments):
        self.file = builtins.open(*arguments)

    def read(self):
        found = self.file.read()
        time.sleep(0.01 + len(found) / 125e3)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

images.open = Throttled
"""
PADDED = """
from torch.utils.data._utils.collate import default_collate_fn_map

class Padded(dict):
    pass

def pad(samples, *, collate_fn_map=None):
    work(0.14)
    return torch.stack([s["image"] for s in samples]), torch.tensor([s["label"] for s in samples])

default_collate_fn_map[Padded] = pad

def _as_dictionary(self, index):
    image, label = _plain(self, index)
    return Padded(image=torch.from_numpy(images.finished(image).copy()), label=label)

Images.__getitem__ = _as_dictionary
"""
SLOW_SINK = """
import logging, time

class OnAShare(logging.FileHandler):
    def emit(self, record):
        super().emit(record)
        time.sleep(0.03)  # until the share answers

mine = logging.getLogger("mine")
mine.propagate = False
mine.addHandler(OnAShare(HERE / "mine.log"))
"""
MANY_PARAMETERS = """

class StandIn(StandIn):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.many = nn.ParameterList([nn.Parameter(torch.zeros(8, 8)) for _ in range(3000)])

    def forward(self, images):
        return super().forward(images) + torch.cat([*self.many]).sum() * 0
"""
BIG = """

class StandIn(StandIn):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.big = nn.Parameter(torch.zeros(6000, 1000))

    def forward(self, images):
        return super().forward(images) + self.big[:1].sum() * 0
"""
FROM_MEMORY = """
_ready = {}

def _from_memory(self, index):
    place = self.train, index % 50
    if place not in _ready:
        image, label = _plain(self, index % 8)
        _ready[place] = images.finished(image), label
    return _ready[place]

Images.unfinished = _from_memory
Images.__len__ = lambda self: 200_000 if self.train else 8
"""
TINY_OPERATIONS = """

class StandIn(nn.Module):
    def __init__(self, classes, *arguments):
        super().__init__()
        self.head, self.gain = nn.Linear(3, classes), nn.Parameter(torch.ones(3))

    def forward(self, images):
        x = images.mean(dim=(2, 3)) * self.gain
        for _ in range(700):
            x = x * 1.001
            x = x + 0.001
        return self.head(x)
"""
SLOW_ON_RANK_1 = """
import os, time

class StandIn(StandIn):
    def forward(self, images):
        if os.environ.get("RANK") == "1":
            time.sleep(0.04)
        return super().forward(images)
"""
SLOW_NETWORK = """
import time
import torch.distributed as dist

def over_a_slow_network(state, bucket):
    summed = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True).get_future()
    def wait(future):
        time.sleep(0.08)
        return future.value()[0]
    return summed.then(wait)
"""

HOOK = "net.register_comm_hook(None, over_a_slow_network)"

ONE_WORKER = ("data.workers=1",)

PLANTS: dict[str, Plant] = {
    "no workers": Plant("no_workers", 70, ("data.workers=0",), data=each_sample("work(0.006)")),
    "too few workers": Plant("few_workers", 80, ONE_WORKER, data=each_sample("work(0.009)")),
    "slow decode": Plant("transforms", 60, data=each_sample("work(0.024)")),
    "slow disk": Plant("disk", 70, data=THROTTLED_FILES),
    "heavy collate": Plant("collate", 80, data=PADDED),
    "one slow worker": Plant(
        "slow_worker", 70, data=each_sample('time.sleep(0.024 if getattr(get_worker_info(), "id", 0) == 1 else 0.002)')
    ),
    "jitter": Plant(
        "jitter", 90, ("data.prefetch_factor=2",), data=each_sample("time.sleep(0.6 if index % 61 == 0 else 0.001)")
    ),
    "stall at epoch start": Plant(
        "epoch_start",
        120,
        ("data.persistent_workers=false",),
        data="_opened = set()\n"
        + each_sample("if os.getpid() not in _opened:", "    time.sleep(0.5)", "    _opened.add(os.getpid())"),
        short_epochs=True,
    ),
    "quota below workers": Plant("quota", 60, ("data.workers=4",), data=each_sample("work(0.008)"), cores=0.8),
    "blocking log sink": Plant(
        "logging", 80, train=before_training(SLOW_SINK) | beside('mine.info("step %d", state.step)')
    ),
    "saving in the loop": Plant(
        "checkpoint", 60, model=BIG, train=beside('torch.save(net.state_dict(), run.dir / "mine.pt")')
    ),
    "slow optimizer": Plant(
        "optimizer",
        60,
        model=MANY_PARAMETERS,
        train={"build_optimizer(net, opt),": "torch.optim.Adam(net.parameters(), lr=opt.lr, foreach=False),"},
    ),
    "long validation": Plant("validation", 70, short_epochs=True),
    "work between steps": Plant(
        "other", 80, train=beside("numbers = sorted(hash((i, i)) for i in range(90000))  # a statistic of one's own")
    ),
    "tiny kernels": Plant("tiny_kernels", 300, model=TINY_OPERATIONS),
    "slow rank": Plant("slow_rank", 70, ONE_WORKER, model=SLOW_ON_RANK_1, processes=2, rank=1),
    "slow data on a rank": Plant(
        "slow_rank",
        70,
        ONE_WORKER,
        data=each_sample('time.sleep(0.012 if os.environ.get("RANK") == "0" else 0.001)'),
        processes=2,
        rank=0,
    ),
    "slow network": Plant(
        "communication",
        60,
        ONE_WORKER,
        processes=2,
        train=before_training(SLOW_NETWORK) | {"    update = make_update(": f"    {HOOK}\n    update = make_update("},
    ),
    "memory grows": Plant(
        "memory",
        175,
        train=beside("kept.append(torch.ones(600_000))") | before_training("kept: list[torch.Tensor] = []"),
    ),
    "memory grows in workers": Plant(
        "memory", 175, data="_cache = []\n" + each_sample("_cache.append(np.ones(40_000))")
    ),
    "files stay open": Plant("files", 175, data="_handles = []\n" + each_sample("_handles.append(open(__file__))")),
}
HEALTHY: dict[str, Plant] = {
    "compute-bound": Plant(None, 250),
    "balanced": Plant(None, 250, data=each_sample("work(0.008)")),
    "tiny model": Plant(None, 14000, ("model.stand_in_ms=0", "data.image_size=8"), data=FROM_MEMORY),
    "two ranks": Plant(None, 240, ONE_WORKER, processes=2),
}
