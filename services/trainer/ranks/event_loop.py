"""The event loop of a rank, in a separate thread: servers and remote calls run there, and no torch work."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class ControlThread:
    """The thread with the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="control", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[None, None, Result]) -> Result:
        """Runs the coroutine on the loop and waits for its result. Every coroutine given here has its own deadlines."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        """Ends the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
