"""The ports and the CUDA devices of this host."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from millrace.errors import Unavailable


def check_free(ports: Mapping[str, int]) -> None:
    """Raises Unavailable, naming the option, if one of `ports` (option → port) is taken."""
    for option, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise Unavailable(
                    f"port {port} is not available: {error.strerror}.",
                    f"choose another with {option}, or stop what holds it (`ss -ltnp 'sport = :{port}'` names it).",
                ) from error


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
