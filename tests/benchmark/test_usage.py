"""Memory and load, against known amounts of both."""

from __future__ import annotations

import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from recipes.benchmark import usage
from recipes.benchmark.usage import Watch, handle_of
from recipes.config import BenchmarkConfig, Config
from recipes.progress import NoDisplay
from recipes.topology import Place

ALONE = Place(0, 1, 0, 0)


class Said(NoDisplay):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, total: int, done: int) -> None:
        self.calls.append(("start", total, done))

    def advance(self, done: int) -> None:
        self.calls.append(done)

    def stop(self) -> None:
        self.calls.append("stop")


def a_watch(warmup: int, display: Any = None, device: str = "cpu") -> Watch:
    made = Config(device=device, benchmark=BenchmarkConfig(warmup=warmup))
    return Watch(display or NoDisplay(), made, ALONE)


def compute(seconds: float) -> None:
    """Keep a core busy for so much of this process's time."""
    ends = time.process_time() + seconds
    while time.process_time() < ends:
        pass


def test_the_display_behind_it_is_told_everything() -> None:
    display = Said()
    watch = a_watch(2, display)
    watch.start(9, 0)
    for step in (1, 2, 3):
        watch.advance(step)
    watch.stop()
    assert display.calls == [("start", 9, 0), 1, 2, 3, "stop"]


@pytest.mark.parametrize("warmup", [0, 1])
def test_the_load_is_that_of_the_measured_steps(warmup: int) -> None:
    watch = a_watch(warmup)
    watch.start(2, 0)
    if warmup:
        compute(0.3)  # must not count
        watch.advance(1)
    began = time.monotonic()
    compute(0.05)
    time.sleep(0.15)
    seconds = time.monotonic() - began
    watch.stop()
    time.sleep(0.1)  # must not count
    assert watch.load() == pytest.approx(0.05 / seconds, rel=0.2)
    machine = watch.machine_load()
    assert machine is not None
    assert 0 < machine <= 1


def test_the_machines_load_is_what_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten seconds on all cores, six idle and one waiting for a disk; a guest counts once."""
    Times = namedtuple("Times", "user nice system idle iowait guest guest_nice")
    clocks = iter([Times(10, 0, 5, 100, 7, 3, 0), Times(12, 0, 6, 106, 8, 4, 0)])
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(clocks))
    watch = a_watch(0)
    watch.start(1, 0)
    watch.stop()
    assert watch.machine_load() == pytest.approx(3 / 10)


def test_the_load_within_one_tick_of_the_kernels_clock_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = psutil.cpu_times()
    monkeypatch.setattr(psutil, "cpu_times", lambda: now)
    watch = a_watch(0)
    watch.start(1, 0)
    watch.stop()
    assert watch.machine_load() is None


def test_peak_memory_is_what_the_kernel_calls_the_high_water_mark() -> None:
    held = np.ones(2**21)
    found = a_watch(0).peak_memory()
    status = Path("/proc/self/status").read_text()
    kibibytes = int(status.partition("VmHWM:")[2].split()[0])
    assert found == pytest.approx(kibibytes * 1024, rel=0.02)
    assert found > held.nbytes


def test_the_figures_of_all_ranks_become_one_usage() -> None:
    watch = a_watch(0)
    watch.start(1, 0)
    compute(0.03)
    watch.stop()
    found = watch.usage(np.array([[2.0**29, 0.5], [2.0**30, 0.75]]))
    assert found.kind == "cpu"
    assert [(r.rank, r.peak_memory_bytes, r.load) for r in found.ranks] == [
        (0, 2**29, 0.5),
        (1, 2**30, 0.75),
    ]


# --- GPUs: a stand-in for NVML


class Nvml:
    """Four devices; the load of each is ten times its number, and it counts its readers."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.looks: dict[int, int] = {}

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        text = f"GPU-{handle}abc-0"
        return text.encode() if handle % 2 else text

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.looks[handle] = self.looks.get(handle, 0) + 1
        return SimpleNamespace(gpu=10 * handle)


@pytest.mark.parametrize(
    ("number", "visible", "handle"),
    [
        (0, None, 0),
        (3, None, 3),
        (1, "", 1),
        (0, "2", 2),
        (1, "2,0", 0),
        (1, "3, 1", 1),
        (0, "GPU-3abc", 3),
        (1, "GPU-0abc-0,GPU-2abc-0", 2),
    ],
)
def test_cudas_number_of_a_device_is_found_in_nvml(
    number: int, visible: str | None, handle: int
) -> None:
    assert handle_of(Nvml(), number, visible) == handle


def test_a_device_that_nvml_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="GPU-9"):
        handle_of(Nvml(), 0, "GPU-9")


def test_the_load_of_a_gpu_is_the_mean_of_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(usage, "_SECONDS_BETWEEN", 0.005)
    monkeypatch.setattr("paddle.device.get_device", lambda: "gpu:1")
    monkeypatch.setattr("paddle.device.cuda.max_memory_allocated", lambda: 12345)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    watch = a_watch(1, device="gpu")
    watch.start(3, 0)
    time.sleep(0.02)
    assert nvml.looks == {3: 1}  # whether it can be read, and no more in the warm-up
    watch.advance(1)
    time.sleep(0.05)
    watch.advance(2)
    watch.stop()
    assert list(nvml.looks) == [3]
    assert nvml.looks[3] > 2
    assert watch.load() == pytest.approx(0.3)
    assert watch.peak_memory() == 12345
    assert watch.usage([(12345, 0.3)]).kind == "gpu"
    assert nvml.calls == ["init", "shutdown"]
    assert not [each for each in threading.enumerate() if each.name == "device-load"]


def test_a_load_that_cannot_be_read_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml()

    def refuse(_: int) -> Any:
        raise Nvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("paddle.device.get_device", lambda: "gpu:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level("WARNING"):
        watch = a_watch(0, device="gpu")
    assert "the device's load cannot be read: Not Supported" in caplog.text
    watch.start(1, 0)
    watch.stop()
    ranks = watch.usage([(1.0, watch.load()), (2.0, 0.5)]).ranks
    assert [rank.load for rank in ranks] == [None, 0.5]
