"""The CUDA devices of this host."""

import os
from pathlib import Path


def visible_devices() -> list[str]:
    """The CUDA devices as CUDA_VISIBLE_DEVICES names them, or all that the driver shows; empty on a host without."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device.strip() for device in named.split(",") if device.strip() not in ("", "-1")]
    # A container that is given the last two of eight has /dev/nvidia6 and 7, and CUDA calls them 0 and 1.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def device_name(driver: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """What an engine will compute on here: the model of the visible CUDA devices as the `driver` names it, or cpu."""
    if not visible_devices():
        return "cpu"
    lines = [line for file in sorted(driver.glob("*/information")) for line in file.read_text().splitlines()]
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(models)) or "cuda"
