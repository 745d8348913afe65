"""A checkpoint file is whole, plain, clean, and loadable in every combination of wrappers; a damaged one is noticed."""

from __future__ import annotations

import os
import pickle
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save
from torch import nn

from fasttrain import checkpoint
from fasttrain.errors import UserError


def network(classes: int = 3) -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    save(path, {"value": 1})
    with pytest.raises(Exception, match="pickle"):
        save(path, {"value": lambda: 0})
    assert checkpoint.load(path) == {"value": 1}
    assert os.listdir(tmp_path) == ["best.pt"]


@pytest.mark.parametrize(
    "prefixes",
    [("module.", ""), ("_orig_mod.", ""), ("module._orig_mod.", ""), ("_orig_mod.module.", ""), ("", "_orig_mod.")],
)
def test_prefixes_of_wrappers_are_taken_off(prefixes: tuple[str, str]) -> None:
    start, inner = prefixes
    assert checkpoint.clean_keys({f"{start}body.{inner}weight": 1}, ["body.weight"]) == {"body.weight": 1}


def test_weights_start_a_model_with_another_number_of_classes(tmp_path: Path) -> None:
    source, target = network(3), network(5)
    save(tmp_path / "a.pt", {"model": source.state_dict()})
    fresh = target[3].weight.detach().clone()
    checkpoint.load_weights(target, tmp_path / "a.pt")
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[3].weight, fresh)


def test_plain_files_of_weights_load_too(tmp_path: Path) -> None:
    source, target = network(), network()
    torch.save({f"module.{k}": v for k, v in source.state_dict().items()}, tmp_path / "a.pth")
    checkpoint.load_weights(target, tmp_path / "a.pth")
    assert torch.equal(target[0].weight, source[0].weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "0.bias"}, "lacks 0.bias"),
        (lambda w: {**w, "9.bias": torch.ones(1)}, "has the unknown 9.bias"),
        (lambda w: {**w, "0.bias": torch.ones(9)}, r"0.bias has shape \(9,\), the model has \(4,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: Any, says: str) -> None:
    save(tmp_path / "a.pt", {"model": change(network().state_dict())})
    with pytest.raises(UserError, match=says):
        checkpoint.load_weights(network(), tmp_path / "a.pt")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


def test_a_full_disk_is_said_and_the_old_file_stays(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "last.pt"
    save(path, {"value": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing past the limit is then an error, not the end
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            save(path, {"value": torch.ones(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert checkpoint.load(path) == {"value": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "cut", "harmful", "list"])
def test_a_file_that_is_no_checkpoint_ends_in_one_line(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pt"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("hello\n" * 100)
    elif kind == "cut":
        torch.save({"a": torch.ones(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "harmful":
        with path.open("wb") as file:
            pickle.dump(Harmful(), file)
    elif kind == "list":
        torch.save([1], path)
    with pytest.raises(UserError, match=r"a\.pt") as caught:
        checkpoint.load(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()


def test_every_kind_of_tensor_is_read_back_by_plain_torch(tmp_path: Path) -> None:
    one = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    tensors = {
        "channels_last": one,
        "again": one.detach(),
        "every second": torch.randn(10)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 2),
        "number": torch.tensor(3),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "complex": torch.tensor(1 + 2j),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "a.pt"
    save(path, {"tensors": tensors, "rest": [1, "text", None, 2.5, (1, True)]})
    content = torch.load(path, weights_only=True)
    assert content["rest"] == [1, "text", None, 2.5, (1, True)]
    for name, tensor in tensors.items():
        found = content["tensors"][name]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor.detach()), name
    assert content["tensors"]["channels_last"].stride() == one.stride()
    with zipfile.ZipFile(path) as archive:
        assert len([name for name in archive.namelist() if "/data/" in name]) == len(tensors) - 1, "saved twice"
    assert all(t.data_ptr() % 64 == 0 for t in torch.load(path, weights_only=True, mmap=True)["tensors"].values())


def test_a_flipped_bit_in_any_part_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save(path, {"model": {"a": torch.randn(1000), "b": torch.ones(5)}, "text": "x" * 50})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = [entry.header_offset + 64 for entry in archive.infolist() if entry.file_size > 100]
    assert len(starts) == 2, "the pickle, and the large tensor"
    for place in (*starts, whole.index(b"x" * 50) + 7):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"a\.pt: (damaged|not a readable)"):
            checkpoint.load(path)


def test_a_damaged_last_is_replaced_by_the_one_before_it_and_said_in_one_line(
    tmp_path: Path, logged: list[str]
) -> None:
    last, previous = tmp_path / "last.pt", tmp_path / "last.previous.pt"
    save(previous, {"step": 1})
    save(last, {"step": 2, "model": torch.randn(100)})
    assert checkpoint.intact(last) == last
    damaged = last.read_bytes()
    for kind in (damaged[:-50], damaged[:500], b"", damaged.replace(damaged[700:720], bytes(20))):
        logged.clear()
        last.write_bytes(kind)
        assert checkpoint.intact(last) == previous
        assert len(logged) == 1, logged
        assert "last.pt" in logged[0]
        assert f"going on from the one before it, {previous}" in logged[0]
    previous.unlink()
    with pytest.raises(UserError, match=r"last\.pt"):
        checkpoint.intact(last)


def test_an_archive_that_is_larger_inside_than_outside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    with pytest.raises(UserError, match="packed, or overlap"):
        checkpoint.load(path)
