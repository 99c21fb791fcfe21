"""What a rank needs while it trains: memory, and how busy its device is."""

from __future__ import annotations

import importlib
import logging
import math
import os
import resource
import threading
import time
from statistics import fmean
from typing import Any

import paddle
import psutil

from recipes.benchmark.record import RankUsage, Usage
from recipes.config import Config, uses_gpu
from recipes.progress import StepDisplay
from recipes.topology import Place

_SECONDS_BETWEEN = 0.1  # two looks at a GPU, whose driver averages over 1/6 s or more

_log = logging.getLogger(__name__)


class Watch:
    """A step display that shows what another one does, and watches the measured steps meanwhile.

    Args:
        display: the one that shows.
        config: checked; its warm-up is not watched.
        place: this process in the job.
    """

    def __init__(self, display: StepDisplay, config: Config, place: Place) -> None:
        self._display = display
        self._warmup = config.benchmark.warmup
        self._place = place
        self._on_gpu = uses_gpu(config)
        self._device_load = device_load() if self._on_gpu else None
        self._begun: _Moment | None = None
        self._ended: _Moment | None = None

    def start(self, total: int, done: int) -> None:
        """Begin with `done` of `total` steps."""
        self._display.start(total, done)
        if self._warmup == 0:
            self._begin()

    def advance(self, done: int) -> None:
        """`done` steps have been taken."""
        self._display.advance(done)
        if done == self._warmup:
            self._begin()

    def stop(self) -> None:
        """The training has ended."""
        self._display.stop()
        self._ended = _Moment()
        if self._device_load is not None:
            self._device_load.stop()

    def peak_memory(self) -> int:
        """Bytes: allocated on the device, or resident in this process (getrusage(2)), so far."""
        if self._on_gpu:
            return int(paddle.device.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def load(self) -> float:
        """Of the device, a fraction, NaN where it cannot be read; on CPU the number of cores that
        this process kept busy."""
        if self._on_gpu:
            return math.nan if self._device_load is None else self._device_load.mean
        begun, ended = self._measured()
        return float((ended.process - begun.process) / (ended.wall - begun.wall))

    def machine_load(self) -> float | None:
        """The share of this machine's cores that were busy, whoever kept them so; None where the
        kernel, which counts in hundredths of a second, saw no time pass."""
        begun, ended = self._measured()
        seconds = ended.all_cores - begun.all_cores
        if seconds == 0:
            return None
        return min(1.0, max(0.0, 1.0 - (ended.idle - begun.idle) / seconds))

    def usage(self, figures: Any) -> Usage:
        """The usage of all ranks.

        Args:
            figures: [world size, 2], each rank's `peak_memory` and `load`.
        """
        ranks = [
            RankUsage(rank, int(memory), None if math.isnan(load) else float(load))
            for rank, (memory, load) in enumerate(figures)
        ]
        return Usage("gpu" if self._on_gpu else "cpu", self.machine_load(), ranks)

    def _begin(self) -> None:
        self._begun = _Moment()
        if self._device_load is not None:
            self._device_load.start()

    def _measured(self) -> tuple[_Moment, _Moment]:
        assert self._begun is not None
        assert self._ended is not None
        return self._begun, self._ended


class _Moment:
    """What the clocks of this process and of the machine's cores show, in seconds."""

    def __init__(self) -> None:
        machine = psutil.cpu_times()
        self.wall = time.monotonic()
        self.process = time.process_time()
        # A guest's time is part of its host process's (proc(5)).
        self.all_cores = float(sum(machine) - machine.guest - machine.guest_nice)
        self.idle = float(machine.idle + machine.iowait)


def device_load() -> DeviceLoad | None:
    """The load of this rank's GPU; None, with a warning, where the driver does not tell it."""
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        found = DeviceLoad(nvml)
        found.look()
    except nvml.NVMLError as error:
        _log.warning("the device's load cannot be read: %s", error)
        return None
    return found


class DeviceLoad:
    """The share of time in which this rank's GPU ran a kernel, looked at by a thread.

    NVML averages over its own sample period (nvmlDeviceGetUtilizationRates); the mean of these is
    taken.

    Args:
        nvml: the module, initialised; `stop` shuts it down.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        number = int(paddle.device.get_device().rpartition(":")[2])
        self._handle = handle_of(self._nvml, number, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._looks: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="device-load", daemon=True)

    @property
    def mean(self) -> float:
        """A fraction."""
        return fmean(self._looks)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._nvml.nvmlShutdown()

    def look(self) -> float:
        """What NVML says now, a fraction."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)

    def _keep_looking(self) -> None:
        while True:
            self._looks.append(self.look())
            if self._ended.wait(_SECONDS_BETWEEN):
                return


def handle_of(nvml: Any, number: int, visible: str | None) -> Any:
    """NVML's handle of the device that CUDA counts as `number`.

    NVML counts all devices of the machine, CUDA those of CUDA_VISIBLE_DEVICES, where a device is
    given by its number or by (the beginning of) its UUID.
    """
    names = [name.strip() for name in visible.split(",")] if visible else []
    name = names[number] if names else str(number)
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if (uuid.decode() if isinstance(uuid, bytes) else uuid).startswith(name):
            return handle
    raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}: NVML knows no device {name}")
