"""Checkpoints whose inside is changed, or that hold code."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import random
import shutil
import struct
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conftest import save
from fuzz_changes import NUMBERS, changed, other
from torch import nn

from fasttrain import checkpoint, resume
from fasttrain.errors import UserError
from fasttrain.state import State
from fasttrain.transfer import Batch
from fasttrain.update import Schedule, Update, build_optimizer


class Evil:
    """A pickle that calls something."""

    def __init__(self, rng: random.Random) -> None:
        self.call = rng.choice(
            [
                (os.system, ("touch ../evil",)),
                (eval, ("open('../evil', 'w')",)),
                (exec, ("import os; os.mkdir('../evil')",)),
                (bytearray, (1 << 45,)),
                (torch.zeros, (1 << 45,)),
                (shutil.rmtree, ("..",)),
                (getattr, (Path, "touch")),
                (Path.touch, (Path("../evil"),)),
            ]
        )

    def __reduce__(self) -> Any:
        return self.call


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _update(net: nn.Module) -> Update:
    optimizer = build_optimizer(net, SimpleNamespace(name="adamw", lr=0.1, betas=(0.9, 0.99), weight_decay=0.1))
    return Update(net, optimizer, Schedule(0.1, 9, 1, 0.0), torch.device("cpu"), dtype=None)


class Checkpoint:
    """best.pt and last.pt."""

    name = "checkpoint"

    def __init__(self, valid: Path) -> None:
        valid.mkdir()
        net = _network()
        update = _update(net)
        net(torch.ones(5, 3)).sum().backward()
        update.optimizer.step()
        self.facts = {
            "classes": ["a", "b"],
            "training_samples": 9,
            "training_data": "x",
            "optimizer": "adamw",
            "effective_batch": 3,
            "settings": {"seed": 0, "data": {"path": "x"}},
        }
        content = {
            "format": checkpoint.FORMAT,
            "model": net.state_dict(),
            "optimizer": update.optimizer.state_dict(),
            "scaler": update.scaler.state_dict(),
            "state": State(1, 3, 4, 0.5, 0).to_dict(),
            "metrics": {"accuracy": 0.5},
            "facts": self.facts,
        }
        self.content = content
        save(valid / "x.pt", content)
        self.whole = (valid / "x.pt").read_bytes()

    def make(self, rng: random.Random, folder: Path) -> None:
        way = rng.randrange(10)
        if way == 0:
            content = changed(rng, self.whole)
        elif way == 1:
            content = pickle.dumps(rng.choice((Evil(rng), {"model": Evil(rng)}, [1], 7)), rng.choice((0, 2, 4)))
        elif way == 2:  # plain data, but not what it should be
            out = io.BytesIO()
            torch.save(other(rng, self.content), out)
            content = out.getvalue()
        else:
            content = self.repacked(rng, self.whole)
        (folder / "x.pt").write_bytes(content)

    def repacked(self, rng: random.Random, whole: bytes) -> bytes:
        """The archive with one or more of its members changed; zipfile writes the right checksums."""
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(out, "w", rng.choice((0, 0, 0, 8))) as new:
            victim = rng.choice(old.namelist())
            for member in old.namelist():
                data, name = old.read(member), member
                if member.endswith("data.pkl") and rng.random() < 0.8:
                    data = self.pickled(rng, data)
                elif member == victim:
                    data = changed(rng, data) if rng.random() < 0.7 else rng.choice((b"", data * 2, bytes(1 << 20)))
                if member == victim and rng.random() < 0.1:
                    name = rng.choice(("../evil", "/evil", "x/" + "x" * 60000, "archive/data.pkl", "a\0b", "x/data/9"))
                if rng.random() > 0.02:
                    new.writestr(name, data)
        return out.getvalue()

    def pickled(self, rng: random.Random, data: bytes) -> bytes:
        """Its instructions changed, one or a few, or others put in their place."""
        if rng.random() < 0.15:
            deep = rng.choice((1000, 100_000))
            return rng.choice(
                [
                    pickle.dumps(Evil(rng), 2),
                    pickle.dumps({"model": {"x": Evil(rng)}}, 2),
                    b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
                    b"\x80\x02)" + b"\x85" * deep + b".",
                    b"\x80\x02}" + b"r\xff\xff\xff\xff" + b".",
                    b"\x80\x02X\xff\xff\xff\x7fa.",
                    b"\x80\x02\x8b\xff\xff\xff\x7f1.",
                    b"\x80\x02ctorch\nzeros\n" + b"\x8a\x06" + (1 << 45).to_bytes(6, "little") + b"\x85R.",
                    b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.",
                    b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0aK\x01sb.",
                ]
            )
        steps = [(op, arg, at) for op, arg, at in pickletools.genops(data)]
        ends = [at for _, _, at in steps[1:] if at is not None] + [len(data)]
        parts = [data[at:end] for (_, _, at), end in zip(steps, ends, strict=True) if at is not None]
        for _ in range(rng.choice((1, 1, 2, 4))):
            at = rng.randrange(len(parts))
            op, arg, _ = steps[at] if at < len(steps) else steps[-1]
            way = rng.randrange(6)
            if way == 0:
                del parts[at]
            elif way == 1:
                parts.insert(at, rng.choice(parts))
            elif way == 2:
                parts[at] = rng.choice(parts)
            elif way == 3:
                parts[at] = changed(rng, parts[at])
            elif isinstance(arg, int) and not op.name.endswith(("PUT", "GET", "PROTO")):
                parts[at] = pickle.dumps(rng.choice(NUMBERS), 2)[2:-1]
            elif isinstance(arg, str) and " " in arg:  # module and name
                names = (b"os\nsystem\n", b"builtins\nexec\n", b"torch\nload\n", b"torch._utils\n_rebuild_tensor_v2\n")
                parts[at] = b"c" + rng.choice(names)
            elif isinstance(arg, str):
                text = rng.choice((b"", b"../evil", b"\xff", b"x" * 10**6, b"9", b"module.0.bias", b"cuda:7", b"meta"))
                parts[at] = b"X" + struct.pack("<I", len(text)) + text
        return b"".join(parts)

    def read(self, folder: Path) -> None:
        _touch(checkpoint.load(folder / "x.pt"))
        try:
            checkpoint.load_weights(_network(), folder / "x.pt")
        except UserError:
            self.resumed(folder / "x.pt")
            raise
        self.resumed(folder / "x.pt")

    def resumed(self, file: Path) -> None:
        net, state = _network(), State()
        update = _update(net)
        resume.restore(file, state, net, update, self.facts)
        with update.forward(Batch((), [], 0, 0, 0, 0, 0.0, None)):
            loss = net(torch.ones(5, 3)).sum()
        update.backward(loss)
        update.step_if_due(state)
        state.to_dict()


def _touch(value: Any, depth: int = 0) -> None:
    """Read all numbers of all tensors."""
    if isinstance(value, torch.Tensor):
        value.clone()
    elif isinstance(value, dict) and depth < 9:
        for each in value.values():
            _touch(each, depth + 1)
