"""The CUDA devices of this host, without importing torch."""

import os
from pathlib import Path


def visible_devices() -> list[str]:
    """The CUDA devices as CUDA_VISIBLE_DEVICES names them, or all that the driver shows; empty on a host without."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device.strip() for device in named.split(",") if device.strip() not in ("", "-1")]
    # A container that is given the last two of eight has /dev/nvidia6 and 7, and CUDA calls them 0 and 1.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
