"""Readings of GPUs. Without GPUs the library is replaced by one that answers as told; the last test needs real ones."""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from millrace.telemetry import usage
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus.members import describe_gpus
from millrace.telemetry.metrics.prometheus.registry import DeclaredRegistry
from millrace.telemetry.usage import GpuMonitor, GpuReading, Gpus, visible

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")


class NVMLError(Exception):
    """As in the library."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A library with three GPUs, of which the last one tells no power."""

    def power(handle: int) -> int:
        if handle == 2:
            raise NVMLError("not supported")
        return 350_500

    library: Any = ModuleType("pynvml")
    library.__spec__ = SimpleNamespace(name="pynvml")
    library.NVMLError, library.NVML_TEMPERATURE_GPU = NVMLError, 0
    library.nvmlInit = lambda: None
    library.nvmlDeviceGetCount = lambda: len(UUIDS)
    library.nvmlDeviceGetHandleByIndex = lambda number: number
    library.nvmlDeviceGetUUID = lambda handle: UUIDS[handle]
    library.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=10 + handle, total=100)
    library.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=25 * handle)
    library.nvmlDeviceGetTemperature = lambda handle, kind: 40 + handle
    library.nvmlDeviceGetPowerUsage = power
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_every_gpu_is_read_and_what_it_does_not_tell_is_none(nvml: Any) -> None:
    assert Gpus().read() == [
        GpuReading("0", 10, 100, 0.0, 350.5, 40.0),
        GpuReading("1", 11, 100, 0.25, 350.5, 41.0),
        GpuReading("2", 12, 100, 0.5, None, 42.0),
    ]


@pytest.mark.parametrize(
    ("named", "numbers"),
    [
        (None, "012"),
        ("", ""),
        ("2,0", "02"),
        ("GPU-aabb", "1"),
        ("GPU-aa, GPU-cccc-3", "012"),
        ("aabb-2", "1"),
        ("-1", ""),
        ("7", ""),
        ("MIG-aaaa", ""),
    ],
)
def test_only_gpus_that_the_process_may_use(
    named: str | None, numbers: str, nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert "".join(one.gpu for one in Gpus(visible()).read()) == numbers


def test_nothing_is_told_without_the_library_or_where_it_fails(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise NVMLError("driver not loaded")

    opened = Gpus()
    with monkeypatch.context() as broken:
        broken.setattr(nvml, "nvmlDeviceGetMemoryInfo", fails)
        assert opened.read() == []
    assert len(opened.read()) == 3
    monkeypatch.setattr(nvml, "nvmlInit", fails)
    assert Gpus().read() == []
    monkeypatch.setattr(usage, "PACKAGE", "no_such_package_at_all")
    assert Gpus().read() == []
    monitor = GpuMonitor()
    monitor.start()
    assert monitor.latest == [] and "gpus" not in {thread.name for thread in threading.enumerate()}


def test_a_gpu_that_hangs_holds_up_nobody(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hangs(handle: int) -> Any:
        asked.set()
        go_on.wait(120)
        return SimpleNamespace(used=1, total=2)

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", hangs)
    monitor = GpuMonitor(["0"], every_s=0.01)
    monitor.start()
    assert asked.wait(60) and monitor.latest == []
    go_on.set()
    monitor.stop()


def test_the_page_has_a_series_for_what_is_known() -> None:
    registry = DeclaredRegistry(Owner.REPLICA)
    describe_gpus(registry, [("a", GpuReading("0", 10, 100, 0.5, None, 40.0)), ("b", GpuReading("0", 20, 100))])
    page = generate_latest(registry).decode()
    assert 'millrace_gpu_busy_ratio{gpu="0",host="a"} 0.5' in page and 'busy_ratio{gpu="0",host="b"}' not in page
    assert 'millrace_gpu_memory_used_bytes{gpu="0",host="b"} 20.0' in page and "power_watts{" not in page
    describe_gpus(registry, [])
    assert 'gpu="0"' not in generate_latest(registry).decode()


@pytest.mark.gpu
def test_real_gpus_are_those_that_torch_sees() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    readings = Gpus(visible()).read()
    assert len(readings) == torch.cuda.device_count()
    for number, one in enumerate(readings):
        _, total = torch.cuda.mem_get_info(number)
        assert abs(one.size_bytes / total - 1) < 0.05 and 0 < one.used_bytes < one.size_bytes
        assert one.busy is not None and 0.0 <= one.busy <= 1.0
    (own,) = Gpus([str(torch.cuda.get_device_properties(0).uuid)]).read()
    assert own.gpu == readings[0].gpu
