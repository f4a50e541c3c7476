"""Work on a device in order, and the seconds that it takes."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

POLL_EVERY_S = 50e-6


class DeviceStream:
    """A CUDA stream for the work that is started inside `with`; on a CPU that work runs at once, in the thread."""

    def __init__(self, device: torch.device) -> None:
        self.cuda: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        self._entered: AbstractContextManager[object] = (
            nullcontext() if self.cuda is None else torch.cuda.stream(self.cuda)
        )
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(None, None, None)

    def follow_current(self) -> None:
        """Work that is started here from now on begins after what the caller's current stream has to do already."""
        if self.cuda is not None:
            self.cuda.wait_stream(torch.cuda.current_stream(self.cuda.device))

    def join(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until all work is done. `check` is called while waiting, and may raise."""
        while self.cuda is not None and not self.cuda.query():
            check()
            time.sleep(POLL_EVERY_S)


class Stopwatch:
    """Adds up how long a stream works on what is started inside `with`."""

    def __init__(self, stream: DeviceStream) -> None:
        self._cuda = stream.cuda
        self._host_s = 0.0
        self._host_began = 0.0
        self._events: list[torch.cuda.Event] = []
        """Beginnings and ends in turn."""

    def __enter__(self) -> None:
        if self._cuda is None:
            self._host_began = time.perf_counter()
        else:
            self._events.append(self._record(self._cuda))

    def __exit__(self, *error: object) -> None:
        if self._cuda is None:
            self._host_s += time.perf_counter() - self._host_began
        else:
            self._events.append(self._record(self._cuda))

    def _record(self, cuda: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(cuda)
        return event

    def seconds(self) -> float:
        """The sum. Called when the stream has done its work."""
        spans = zip(self._events[::2], self._events[1::2], strict=True)
        return self._host_s + sum(float(began.elapsed_time(ended)) for began, ended in spans) / 1e3
