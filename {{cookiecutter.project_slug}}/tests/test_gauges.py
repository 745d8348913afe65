"""Gauges: what can't be read is None and said once for each cause; a training never notices."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from fasttrain import gauges, host
from fasttrain.gauges import Gauges, Sample, visible_device


@pytest.fixture
def warned() -> Iterator[list[str]]:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(str(message)), level="WARNING", format="{message}")
    yield said
    logger.remove(sink)


def nothing(name: str, **fields: Any) -> None:
    pass


class StandIn:
    """A GPU whose utilisation is not supported, and which fails altogether from the third look on."""

    looks = 0

    def readings(self) -> Mapping[str, Callable[[], Any]]:
        self.looks += 1
        return {
            "gpu": self.utilisation,
            "gpu_power": lambda: self.reading(200.0),
            "gpu_temperature": lambda: self.reading(60.0),
        }

    def utilisation(self) -> float:
        raise RuntimeError("GPU is lost" if self.looks >= 3 else "Not Supported")

    def reading(self, value: float) -> float:
        if self.looks >= 3:
            raise RuntimeError("GPU is lost")
        return value


class Counted:
    def __init__(self, call: Callable[[], gauges.Gpu]) -> None:
        self.call, self.calls = call, 0

    def __call__(self) -> gauges.Gpu:
        self.calls += 1
        return self.call()


def no_library() -> gauges.Gpu:
    raise OSError("NVML Shared Library Not Found")


def test_the_machine_is_read(tmp_path: Path, warned: list[str]) -> None:
    sampler = Gauges(nothing, tmp_path, None)
    sampler.sample()
    sample = sampler.sample()
    assert sample is sampler.latest
    assert sample.cores
    assert sample.cpu == pytest.approx(sum(sample.cores) / len(sample.cores))
    assert 0 < (sample.memory_used or 0) < (sample.memory_total or 0)
    assert (sample.rss or 0) > 1e6
    before = sample.open_files
    with (tmp_path / "one more").open("w"):
        assert sampler.sample().open_files == (before or 0) + 1
    assert (sample.gpu, sample.gpu_memory_total) == (None, None)
    assert warned == []


def test_without_a_cuda_device_nvml_is_left_alone(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it would raise
    assert Gauges(nothing, None, None).sample().gpu is None
    assert warned == []


@pytest.mark.parametrize("failing", ["import", "library", "init"])
def test_a_missing_nvml_is_said_once(failing: str, monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    opened: Counted | None = None
    if failing == "import":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        sampler = Gauges(nothing, None, 0)
    elif failing == "init":
        module = types.ModuleType("pynvml")
        module.__dict__["nvmlInit"] = no_library
        monkeypatch.setitem(sys.modules, "pynvml", module)
        sampler = Gauges(nothing, None, 0)
    else:
        opened = Counted(no_library)
        sampler = Gauges(nothing, None, 0, gpu=opened)
    for _ in range(5):
        sample = sampler.sample()
        assert (sample.gpu, sample.gpu_power) == (None, None)
        assert sample.memory_total
    assert opened is None or opened.calls == 1  # what is missing is not looked for again
    assert len(warned) == 1
    assert "training is not affected" in warned[0]


def test_readings_that_fail_become_none_with_one_warning_a_cause(warned: list[str]) -> None:
    sampler = Gauges(nothing, None, 0, gpu=StandIn)
    samples = [sampler.sample() for _ in range(6)]
    assert [sample.gpu for sample in samples] == [None] * 6
    assert [sample.gpu_power for sample in samples] == [200.0, 200.0, None, None, None, None]
    assert len(warned) == 2
    assert "gpu not available (Not Supported)" in warned[0]
    assert "gpu, gpu_power, gpu_temperature not available (GPU is lost)" in warned[1]


def test_nvml_is_read_through_its_own_calls(monkeypatch: pytest.MonkeyPatch, warned: list[str]) -> None:
    uuids = ["GPU-aaa", "GPU-bbb", "GPU-ccc"]
    module = types.SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: uuids[handle],
        nvmlDeviceGetName=lambda handle: f"card {handle}".encode(),
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=10 * handle),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=1, total=handle + 1),
        nvmlDeviceGetTemperature=lambda handle, kind: 60 + handle,
        nvmlDeviceGetPowerUsage=lambda handle: 1500,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,1")
    first, second = (Gauges(nothing, None, index).sample() for index in (0, 1))
    exact = Gauges(nothing, None, 0, uuid="bbb").sample()
    assert (first.gpu_name, first.gpu, first.gpu_memory_total, first.gpu_temperature) == ("card 2", 20.0, 3, 62.0)
    assert (second.gpu_name, exact.gpu_name, second.gpu_power) == ("card 1", "card 1", 1.5)
    assert warned == []


@pytest.mark.parametrize(
    ("index", "uuid", "visible", "wanted"),
    [
        (1, None, None, 1),
        (1, None, "3, 2", 2),
        (0, None, "GPU-abc,1", "GPU-abc"),
        (0, None, "MIG-xyz", "MIG-xyz"),
        (0, "12-34", "5", "GPU-12-34"),
        (4, None, "0", 4),
    ],
)
def test_the_visible_devices_are_mapped(index: int, uuid: str | None, visible: str | None, wanted: int | str) -> None:
    assert visible_device(index, uuid, visible) == wanted


def test_samples_come_as_events_and_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, dict[str, Any]]] = []
    arrived = threading.Event()

    def event(name: str, **fields: Any) -> None:
        got.append((name, fields))
        arrived.set()

    with Gauges(event, None, None) as sampler:
        assert arrived.wait(30)
    assert not sampler._thread.is_alive()
    name, fields = got[0]
    assert name == "gauges"
    assert None not in fields.values()
    assert set(fields) <= set(Sample.__dataclass_fields__)
    assert fields["memory_total"] > 0


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_that_of_the_container_where_it_has_a_limit(version: int, tmp_path: Path) -> None:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit, usage, cache = names[version]
    root = tmp_path / "sys/fs/cgroup"
    group = (root / "memory" if version == 1 else root) / "outer" / "inner"
    group.mkdir(parents=True)
    (group / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    (group / usage).write_text("1\n")
    (group.parent / limit).write_text("400000000\n")
    (group.parent / usage).write_text("300000000\n")
    (group.parent / "memory.stat").write_text(f"anon 5\n{cache} 100000000\n")
    own = tmp_path / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text("0::/outer/inner\n" if version == 2 else "5:cpu:/x\n4:memory:/outer/inner\n")
    assert host.memory(tmp_path) == (200000000, 400000000)
    (group.parent / limit).write_text(f"{2**60}\n")
    assert host.memory(tmp_path)[1] > 400000000


def test_disk_throughput_is_the_difference_of_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [{"sda": (0, 0, 0), "sdb": (5_000_000, 0, 900)}, {"sda": (0, 0, 0), "sdb": (25_000_000, 10_000_000, 1900)}]
    moments = iter([10.0, 12.0])

    def counters(perdisk: bool = False) -> Any:
        fields = ("read_bytes", "write_bytes", "busy_time")
        disks = {
            name: types.SimpleNamespace(**dict(zip(fields, values, strict=True))) for name, values in looks[0].items()
        }
        return disks if perdisk else disks["sdb"]

    monkeypatch.setattr("fasttrain.host.psutil.disk_io_counters", counters)
    monkeypatch.setattr("fasttrain.host.time.monotonic", lambda: next(moments))
    machine = host.Host(None)
    assert machine.readings()["disk"]() == {}
    looks.pop(0)
    assert machine.readings()["disk"]() == {"disk_read": 10.0, "disk_write": 5.0, "disk_busy": 50.0}
