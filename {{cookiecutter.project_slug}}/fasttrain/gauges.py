"""Gauges of the machine: processor, memory, disk, open files and GPU, sampled in a thread at most once a second.

What can't be read is None (shown as n/a). A reading that fails is said once for each cause and never raised.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from loguru import logger

from fasttrain.host import Host


@dataclass(frozen=True)
class Sample:
    """One look at the machine. Percentages 0 to 100, sizes in bytes, throughput in MB/s (10^6 bytes); None is n/a."""

    cpu: float | None = None  # mean of the cores that this process may use
    cores: tuple[float, ...] | None = None  # each of them
    memory_used: int | None = None  # of the container where it has a limit, else of the machine
    memory_total: int | None = None
    rss: int | None = None  # resident memory of this process
    open_files: int | None = None  # handles of this process
    private: int | None = None  # of rss: bytes shared with no other process and no file
    process_cpu: float | None = None  # seconds on cores since its start, of this process without its loader workers
    throttled: float | None = None  # seconds since its start that the CPU quota made this container stand still
    disk_read: float | None = None
    disk_write: float | None = None
    disk_busy: float | None = None  # Linux; part of the time that the device had work
    gpu_name: str | None = None
    gpu: float | None = None  # utilisation as NVML gives it
    gpu_memory_used: int | None = None  # by all processes
    gpu_memory_total: int | None = None
    gpu_temperature: float | None = None  # degrees Celsius
    gpu_power: float | None = None  # watts


class Gpu(Protocol):
    """A source of GPU readings: each call may raise."""

    def readings(self) -> Mapping[str, Callable[[], Any]]:
        """A function for each field of `Sample` that this device may know, by the field's name."""


class Nvml:
    """An NVIDIA GPU through NVML.

    Args:
        device_index: torch's number of the device, that is within CUDA_VISIBLE_DEVICES.
        uuid: the device's UUID where known. Without it the number is mapped, and NVML's order (by PCI bus) need not be
            CUDA's on a machine with different GPUs.

    Raises:
        Exception: NVML or its library is missing, or does not know the device.
    """

    def __init__(self, device_index: int, uuid: str | None = None) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        name = visible_device(device_index, uuid, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if isinstance(name, int):
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(name)
        else:
            self._handle = self._by_uuid(name)

    def readings(self) -> Mapping[str, Callable[[], Any]]:
        nvml, handle = self._nvml, self._handle
        return {
            "gpu_name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "gpu": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "gpu_memory_used": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "gpu_memory_total": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "gpu_temperature": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }

    def _by_uuid(self, name: str) -> Any:
        if name.startswith("MIG"):
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        for index in range(self._nvml.nvmlDeviceGetCount()):  # CUDA takes a unique beginning of a UUID too
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            if _text(self._nvml.nvmlDeviceGetUUID(handle)).startswith(name):
                return handle
        raise LookupError(f"NVML knows no device {name}")


def visible_device(index: int, uuid: str | None, visible: str | None) -> int | str:
    """What NVML has to look for: its own number of a device, or the (beginning of the) device's UUID."""
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    names = [name.strip() for name in visible.split(",") if name.strip()] if visible else []
    if index >= len(names):
        return index
    return int(names[index]) if names[index].isdigit() else names[index]


class Gauges:
    """Samples the machine in a daemon thread; `latest` is the last sample. A context manager.

    Args:
        recorder_event: called as ``recorder_event("gauges", **fields)`` with what is known of each sample.
        data_path: a file or folder on the disk to watch; None, or a disk that can't be told, watches all of them.
        device_index: torch's number of the NVIDIA device in use; None leaves NVML alone (a CPU, AMD or Apple device).
        every: seconds between samples, at least 1.
        uuid: the CUDA device's UUID where known.
        gpu: makes the source of GPU readings in the place of `Nvml`.
    """

    def __init__(
        self,
        recorder_event: Callable[..., None],
        data_path: Path | None,
        device_index: int | None,
        every: float = 1.0,
        *,
        uuid: str | None = None,
        gpu: Callable[[], Gpu] | None = None,
    ) -> None:
        self.latest: Sample | None = None
        self._event = recorder_event
        self._every = max(1.0, every)
        self._host = Host(data_path)
        self._open_gpu = gpu or (None if device_index is None else lambda: Nvml(device_index, uuid))
        self._gpu: Gpu | None = None
        self._warned: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)

    def start(self) -> Gauges:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the sampling; a reading that hangs is left behind after two seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    def __enter__(self) -> Gauges:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def sample(self) -> Sample:
        """Takes one sample now. Throughput and load are those since the last one."""
        failed: dict[str, list[str]] = defaultdict(list)
        values = _read(self._host.readings(), failed)
        values |= values.pop("disk", {})
        if cores := values.get("cores"):
            values["cpu"] = sum(cores) / len(cores)
        if self._open_gpu is not None and self._gpu is None:
            opened = _read({"the GPU": self._open_gpu}, failed)
            self._gpu = opened.get("the GPU")
            if self._gpu is None:
                self._open_gpu = None  # missing now is missing for the run
        if self._gpu is not None:
            values |= _read(self._gpu.readings(), failed)
        for cause, names in failed.items():
            if cause not in self._warned:
                self._warned.add(cause)
                logger.warning(f"gauges: {', '.join(names)} not available ({cause}); training is not affected")
        self.latest = Sample(**values)
        return self.latest

    def _run(self) -> None:
        _read(self._host.readings(), defaultdict(list))  # load and throughput are differences: here they start
        while not self._stop.wait(self._every):
            known = {name: value for name, value in asdict(self.sample()).items() if value is not None}
            self._event("gauges", **known)


def _read(readings: Mapping[str, Callable[[], Any]], failed: dict[str, list[str]]) -> dict[str, Any]:
    """Calls each reading; those that raise are left out and noted under their cause."""
    values: dict[str, Any] = {}
    for name, reading in readings.items():
        try:
            values[name] = reading()
        except Exception as error:  # drivers raise what they like; the caller says it
            failed[str(error) or type(error).__name__].append(name)
    return values


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
