"""What the GPUs of this host do, as NVIDIA's management library (NVML) tells it. Starts no CUDA.

Its Python package `nvidia-ml-py` comes with the GPU builds of the engines; without it nothing is told. A GPU that hangs
may block a call for ever, so readings are taken on a thread that nothing waits for.
"""

import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

Answer = TypeVar("Answer")
log = structlog.get_logger(__name__)
EVERY_S = 2.0
PACKAGE = "pynvml"


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one time. What it does not tell is None."""

    gpu: str
    """Number of the GPU on its host, as `nvidia-smi` counts."""
    used_bytes: int
    """Memory that all processes together use."""
    size_bytes: int
    busy: float | None = None
    """Part of the last moment (up to a second) in which it ran a kernel, 0 to 1."""
    power_w: float | None = None
    temperature_c: float | None = None


class Gpus:
    """The GPUs of this host that `wanted` names, opened once: numbers or UUIDs, or beginnings of UUIDs. None: all."""

    def __init__(self, wanted: Sequence[str] | None = None) -> None:
        self._nvml: Any = None  # Any: the library has no types
        self._handles: list[tuple[str, Any]] = []
        if importlib.util.find_spec(PACKAGE) is None:
            return
        nvml = importlib.import_module(PACKAGE)
        try:
            nvml.nvmlInit()
            handles = [(str(n), nvml.nvmlDeviceGetHandleByIndex(n)) for n in range(nvml.nvmlDeviceGetCount())]
            self._handles = [(n, handle) for n, handle in handles if wanted is None or _named(nvml, n, handle, wanted)]
        except nvml.NVMLError as error:
            log.info("GPUs are not measured", reason=str(error))
            return
        self._nvml = nvml

    def read(self) -> list[GpuReading]:
        """A reading of each; none where they cannot be read."""
        if self._nvml is None:
            return []
        with contextlib.suppress(self._nvml.NVMLError):
            return [self._reading(number, handle) for number, handle in self._handles]
        return []

    def _reading(self, number: str, handle: Any) -> GpuReading:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = self._ask_device(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power_mw = self._ask_device(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        temperature = self._ask_device(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuReading(
            gpu=number,
            used_bytes=int(memory.used),
            size_bytes=int(memory.total),
            busy=None if rates is None else rates.gpu / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=None if temperature is None else float(temperature),
        )

    def _ask_device(self, ask: Callable[[], Answer]) -> Answer | None:
        """The answer; None where this kind of GPU has none."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return None


class GpuMonitor:
    """Keeps readings current on a thread of its own."""

    def __init__(self, wanted: Sequence[str] | None = None, every_s: float = EVERY_S) -> None:
        self.latest: list[GpuReading] = []
        """Empty until the first reading, and where there is nothing to read."""
        self._wanted, self._every_s = wanted, every_s
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins. Where the library is not installed nothing is started."""
        if importlib.util.find_spec(PACKAGE) is not None:
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        gpus = Gpus(self._wanted)
        while True:
            self.latest = gpus.read()
            if self._stopped.wait(self._every_s):
                return


def visible() -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None: all of the host."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if named is None else [one.strip() for one in named.split(",") if one.strip()]


def _named(nvml: Any, number: str, handle: Any, wanted: Sequence[str]) -> bool:
    if number in wanted:
        return True
    uuid = nvml.nvmlDeviceGetUUID(handle)
    uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    named = [one.removeprefix("GPU-") for one in wanted if not one.isdecimal()]
    return any(one and uuid.removeprefix("GPU-").startswith(one) for one in named)
